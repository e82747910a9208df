"""hop for programs that bring the lookup as a tool of their own.

The folder is that of `hop_files`, but a program is told what the white-box agent is told, "Qi",
and nothing else: what a key is for is in the description of its tool. So a policy that knows
nothing but the quick-start task can be behind any agent with a tool that reads a file.
"""

import numpy as np

from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.tasks import hop
from forge_jax.agents.tasks.hop_files import HopFiles
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Task


def agent() -> ToolLoop:
    """The white-box agent of hop."""
    return hop.agent()


def play(rng: np.random.Generator) -> tuple[ScriptedCall, ...]:
    """Play of the white-box agent."""
    return hop.play(rng)


def workspace_of(task: Task) -> HopFiles:
    """The folder that a task's family, split and seed make."""
    world = hop.world_of(task)
    return HopFiles(world, f"Q{world.chain[0]}")


def scripted(task: Task, rng: np.random.Generator) -> tuple[ScriptedCall, ...]:
    """One scripted episode of `task`, with the usual errors."""
    return hop.script(hop.world_of(task), rng, hop.NOISE)
