"""The task families by name."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from forge_jax.agents.black_box import black_box
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Agent, ScriptedCall, Workspace
from forge_jax.agents.tasks import (
    calc,
    desk,
    gather,
    hop,
    hop_files,
    hop_slow,
    hop_spoken,
    hop_tool,
    maze,
    notes,
    qa,
    reasoning,
    trail,
    wiki,
    wiki_team,
)
from forge_jax.agents.team import Team
from forge_jax.agents.white_box import ToolLoop
from forge_jax.config import ContextConfig, UserError
from forge_jax.programs import ProgramConfig
from forge_jax.tool_servers import ToolsConfig
from forge_jax.types import Task


class Family(Protocol):
    """What a family's module offers."""

    def agent(self) -> Agent:
        """An agent for the family's tasks; it keeps no state between them."""
        ...

    def play(self, rng: np.random.Generator) -> tuple[ScriptedCall, ...]:
        """The calls of one scripted episode on training content, the same for the same `rng`.

        Each is one training sample: the reply is to be imitated, all before it is context.
        """
        ...


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "calc": calc,
        "desk": desk,
        "gather": gather,
        "hop": hop,
        "hop_slow": hop_slow,
        "hop_spoken": hop_spoken,
        "hop_tool": hop_tool,
        "maze": maze,
        "notes": notes,
        "qa": qa,
        "reasoning": reasoning.Reasoning(),
        "trail": trail,
        "wiki": wiki,
        "wiki_team": wiki_team,
    }
)


def family_of(name: str) -> Family:
    """The family called `name`, of reasoning also `reasoning:GENERATOR+GENERATOR`.

    Raises UserError naming it and those there are.
    """
    if name.startswith(f"{reasoning.FAMILY}:"):
        return reasoning.Reasoning(name)
    if name not in FAMILIES:
        raise UserError(f"task={name!r} is not a task family; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


Play = Callable[[np.random.Generator], tuple[ScriptedCall, ...]]
# Of the families whose script can manage its context in any way.
MANAGED: Mapping[str, Callable[..., tuple[ScriptedCall, ...]]] = MappingProxyType(
    {"maze": maze.play, "trail": trail.play, "wiki": wiki.play}
)
# Of the families that have more than one level of difficulty.
LEVELS: Mapping[str, int] = MappingProxyType(
    {
        "calc": len(calc.LEVELS),
        "desk": len(desk.LEVELS),
        "gather": len(gather.LEVELS),
        "hop_slow": len(hop_slow.LEVELS),
        "maze": len(maze.LEVELS),
        "qa": len(qa.LEVELS),
        "trail": len(trail.LEVELS),
        "wiki": len(wiki.LEVELS),
        "wiki_team": len(wiki.LEVELS),
    }
)
# Of these, the families whose script is another at every level: all but those whose levels differ
# in how long a tool takes.
SCRIPTED_BY_LEVEL = frozenset(LEVELS) - {"hop_slow"}


def play_of(name: str, context: ContextConfig | None = None, level: int = 0) -> Play:
    """Scripted play of the family called `name` at a level, its context managed where it can be.

    Raises UserError as `family_of`, and where its script does not call what the model is to call.
    """
    play: Callable[..., tuple[ScriptedCall, ...]] = family_of(name).play
    if name.partition(":")[0] == reasoning.FAMILY or name in SCRIPTED_BY_LEVEL:
        play = partial(play, level=level)
    if context is not None and name in MANAGED:
        return partial(play, context=context)
    if context is not None and context.policy == "tool":
        known = ", ".join(MANAGED)
        raise UserError(
            f"context.policy=tool: the script of task={name!r} does not call "
            f"{context.operation}, only those of {known} do; warm.steps=0 imitates none"
        )
    return play


def check_level(name: str, level: int) -> None:
    """Raises UserError where the family called `name` has no such level."""
    if name.partition(":")[0] == reasoning.FAMILY:  # whose generators have levels of their own
        for generator in reasoning.names_of(name):
            reasoning.dataset(generator, level)
        return
    last = LEVELS.get(name, 1) - 1
    if level > last:
        raise UserError(f"level={level} of task={name!r} must be from 0 to {last}")


# Of the families whose worlds are a folder, which any agent can work in.
WORKSPACES: Mapping[str, Callable[[Task], Workspace]] = MappingProxyType(
    {
        "hop": hop_files.workspace_of,
        "hop_tool": hop_tool.workspace_of,
        "trail": trail.workspace_of,
    }
)

Script = Callable[[Task, np.random.Generator], tuple[ScriptedCall, ...]]
# Of the families whose tasks an agent can be led through by replies that are known before.
SCRIPTS: Mapping[str, Script] = MappingProxyType({"hop_tool": hop_tool.scripted})


def script_of(name: str) -> Script:
    """What the model says in scripted episodes of a task, whatever agent asks it.

    Raises UserError where the family called `name` has none.
    """
    if name not in SCRIPTS:
        known = ", ".join(SCRIPTS)
        raise UserError(f"task={name!r} has no script to demonstrate; those that do: {known}")
    return SCRIPTS[name]


def agent_of(
    name: str,
    program: ProgramConfig | None = None,
    tools: ToolsConfig | None = None,
    context: ContextConfig | None = None,
) -> Agent:
    """An agent for tasks of the family called `name`: its own, a program, or a white-box agent
    with the tools of MCP servers. With a `context` its context is managed so.

    Raises UserError as `family_of`, where the others cannot work at its tasks, where this one
    cannot run here, or where its context is its own.
    """
    manager = Manager() if context is None else Manager(cfg=context)
    agent = _agent_of(name, program, tools, manager)
    if context is None or tools is not None:
        return agent
    if not isinstance(agent, ToolLoop | Team):
        whose = "a program" if program is not None else f"the agent of task={name!r}"
        raise UserError(f"context.policy={context.policy}: {whose} manages its context itself")
    return dataclasses.replace(agent, manager=manager)


def _agent_of(
    name: str, program: ProgramConfig | None, tools: ToolsConfig | None, manager: Manager
) -> Agent:
    family = family_of(name)
    if program is None and tools is None:
        return family.agent()
    if program is not None and tools is not None:
        raise UserError("agent and tools: a program has tools of its own; give one of them")
    if name not in WORKSPACES:
        known = ", ".join(WORKSPACES)
        raise UserError(f"task={name!r} has no workspace; agent and tools go with: {known}")
    if tools is not None:
        # Importing mcp takes a second, and few runs have tools of its servers.
        from forge_jax.agents.mcp import mcp_agent

        return mcp_agent(tools, WORKSPACES[name], manager)
    assert program is not None
    return black_box(program, WORKSPACES[name])
