"""trail: follow a trail of lookups to its end, and remember what the first one found.

The tool and its words are those of `hop`. A level 0 trail takes two to six lookups, one of level 1,
made for tests of a policy trained on level 0, seven to ten. The answer is the digit at the end and
the first letter found, which stands in no message that a context keeps whatever is dropped:

    Ti   ?i   =l   ?l   =b   ?b   =a   ?a   =3   !3l

With its whole context the agent can read the letter there. Where the context is managed (NOTE,
SUMMARY), it survives only in what the model writes, and so may the place where it is:

    Ti   ?i   =l   ?l   =b   Note?   l        Ti   l   ?l   =b   ?b   =a   ?a   =3   Note?   l
    Ti   ?i   =l   ?l   =b   Summarise ...   lb        Ti   lb   ?b   =a   ?a   =3   ...

The reward is 1 if and only if both characters are right. A third each of scripted episodes has
the whole context, notes and summaries, so that a policy that imitated them can begin with either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase, digits
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import calling, led, saying
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.tasks import hop
from forge_jax.agents.tasks.hop_files import HopFiles
from forge_jax.agents.white_box import ToolLoop
from forge_jax.managing import WRITTEN, ContextConfig
from forge_jax.types import Task

MAX_TURNS = 14
LEVELS = ((2, 6), (7, 10))  # fewest and most lookups
WHOLE = ContextConfig()
NOTE = ContextConfig(policy="fixed", every=2, operation="note", keep=1)
SUMMARY = ContextConfig(policy="fixed", every=2, operation="summarise")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins about 0.62 of its episodes with whole contexts,
    and 0.54 with notes or summaries."""

    early: float = 0.11  # answers what it has, at a letter
    wrong: float = 0.05  # looks up a random letter
    lost: float = 0.08  # writes down another letter


NOISE = Noise()


@dataclass(frozen=True)
class Trail:
    """The world of one trail."""

    chain: str  # letters, then a digit

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"T{self.chain[0]}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (hop.LOOKUP,)

    def look_up(self, key: str) -> str:
        """What comes after `key`, hop.ABSENT where nothing does."""
        return hop.Hop(self.chain).look_up(key)

    def answer(self, known: str) -> str:
        """The answer of who takes `known` for the digit."""
        return f"!{known}{self.chain[1]}"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is a lookup of a text."""
        return await hop.Hop(self.chain).call(name, arguments)

    async def score(self, answer: str) -> float:
        return float(answer == self.answer(self.chain[-1]))


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """A random chain."""
    fewest, most = LEVELS[level]
    letters = rng.permutation(list(ascii_lowercase))[: rng.integers(fewest, most + 1)]
    return "".join(letters) + digits[rng.integers(len(digits))]


def world_of(task: Task) -> Trail:
    """The world that a task's family, split, seed and level make."""
    return Trail(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def lookups_of(task: Task) -> int:
    """How many lookups the way to the digit takes."""
    return len(world_of(task).chain) - 1


def agent() -> ToolLoop:
    """An agent for tasks of this family, with its whole context."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=hop.MAX_TOKENS)


def workspace_of(task: Task) -> HopFiles:
    """The folder that a program works in: each lookup a file."""
    world = world_of(task)
    return HopFiles(world, world.messages[0]["content"])


def play(
    rng: np.random.Generator,
    noise: Noise = NOISE,
    context: ContextConfig | None = None,
    level: int = 0,
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training trail; None: under any of three."""
    world = Trail(draw_from("train", partial(draw, level=level), rng))
    drawn = (WHOLE, NOTE, SUMMARY)[rng.integers(3)]
    return script(world, rng, noise, drawn if context is None else context)


def script(
    world: Trail, rng: np.random.Generator, noise: Noise, context: ContextConfig = WHOLE
) -> tuple[ScriptedCall, ...]:
    """Follows the trail and writes down what it must, erring as `noise` says."""
    follower = Follower(world=world, rng=rng, noise=noise, context=context, at=world.chain[0])
    return led(follower, world.messages, world.tools, Manager(cfg=context), MAX_TURNS)


@dataclass
class Follower:
    """The script; implements `Leader`."""

    world: Trail
    rng: np.random.Generator
    noise: Noise
    context: ContextConfig
    at: str  # the last thing found
    first: str = ""  # the first letter found, or what was noted in its place
    looked: bool = False  # since the operation that is its own to call

    def reply(self, context: Context) -> Message:
        """Answers at the digit, else looks up the next letter."""
        operation = self.context.operation
        if self.looked and self.context.policy == "tool" and operation is not None:
            self.looked = False
            return calling(operation, {"text": self.write()} if operation in WRITTEN else {})
        luck = self.rng.random()
        if self.at in digits or (self.first and luck < self.noise.early):
            return saying(f"!{self.at}{self.first}")
        lost = self.noise.early <= luck < self.noise.early + self.noise.wrong
        key = ascii_lowercase[self.rng.integers(len(ascii_lowercase))] if lost else self.at
        return calling("lookup", {"key": key})

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        found, self.looked = self.world.look_up(arguments["key"]), True
        if found != hop.ABSENT:
            self.first = self.first or found
            self.at = found
        return found

    def write(self) -> str:
        """The letter to remember; a summary also says where one is."""
        if self.first and self.rng.random() < self.noise.lost:
            self.first = ascii_lowercase[self.rng.integers(len(ascii_lowercase))]
        first = self.first or hop.ABSENT
        return f"{first}{self.at}" if self.context.operation != "note" else first
