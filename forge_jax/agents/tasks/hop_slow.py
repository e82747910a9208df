"""hop_slow: longer chains than those of hop, an answer to remember, and a tool that takes its time.

The tool and the words are those of `hop`. A chain has four or five letters; the question is marked
by a Z, and the answer is the digit at the end and then the letter at the beginning:

    Zi   ?i   =l   ?l   =b   ?b   =a   ?a   =3   !3i

Every lookup of a training task takes as long as the task's seed says: log-normal, with mean and cut
by the level, a row of LEVELS. It waits, and computes nothing: what is slow is the world, not
the machine. All rollouts of a task wait alike, so a group is as slow as its task. Held-out tasks do
not wait, which changes nothing that the model sees.

There are 3.6 million chains of four letters and 79 million of five; half of the tasks are of each.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Any

import numpy as np

from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.tasks import hop
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Task

MAX_TURNS = 7
LEVELS = ((0.4, 3.0), (2.0, 15.0))  # mean seconds of a lookup, and the longest
SIGMA = 1.0
NOISE = hop.Noise(early=0.1)  # wins 0.58 of its episodes
SLOWNESS = 0x510  # in the seed of how long a task's lookups take


@dataclass(frozen=True)
class SlowHop:
    """The world of one chain, whose lookups wait."""

    chain: str  # letters, then a digit
    seconds: float = 0.0  # of every lookup

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"Z{self.chain[0]}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (hop.LOOKUP,)

    def look_up(self, key: str) -> str:
        """What comes after `key`, hop.ABSENT where nothing does."""
        return hop.Hop(self.chain).look_up(key)

    def answer(self, known: str) -> str:
        """The answer of who takes `known` for the digit."""
        return f"!{known}{self.chain[0]}"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall, at once, unless it is a lookup of a text."""
        found = await hop.Hop(self.chain).call(name, arguments)
        await asyncio.sleep(self.seconds)
        return found

    async def score(self, answer: str) -> float:
        return float(answer == self.answer(self.chain[-1]))


def draw(rng: np.random.Generator) -> str:
    """A random chain of four or five letters."""
    letters = rng.permutation(list(ascii_lowercase))[: rng.integers(4, 6)]
    return "".join(letters) + digits[rng.integers(len(digits))]


def seconds_of(task: Task) -> float:
    """How long a lookup of a task takes."""
    mean, longest = LEVELS[level_of(task, len(LEVELS))]
    return drawn_seconds(task, SLOWNESS, mean, SIGMA, longest)


def drawn_seconds(task: Task, salt: int, mean: float, sigma: float, longest: float) -> float:
    """How long a wait of a task takes: log-normal by its seed and cut off; held out, 0."""
    if task.split == "eval":
        return 0.0
    drawn = np.random.default_rng([salt, task.seed]).lognormal(-(sigma**2) / 2, sigma)
    return min(mean * float(drawn), longest)


def world_of(task: Task) -> SlowHop:
    """The world that a task's family, split and seed make."""
    return SlowHop(content_of(task, draw), seconds_of(task))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=hop.MAX_TOKENS)


def play(rng: np.random.Generator, noise: hop.Noise = NOISE) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training chain."""
    return script(SlowHop(draw_from("train", draw, rng)), rng, noise)


def script(world: SlowHop, rng: np.random.Generator, noise: hop.Noise) -> tuple[ScriptedCall, ...]:
    """As that of `hop`, in as many turns as there are here."""
    return hop.script(world, rng, noise, MAX_TURNS)
