"""gather: look up two to four keys, none of which depends on another, then answer all values.

A seed makes distinct letters, each with a digit. Each lookup of a training task waits, so asking
for one key a reply takes as long as there are keys, and all of them in one reply as long as one:

    Wab   ?a   =3   ?b   =7   !37          Wab   ?a  ?b   =3  =7   !37

The reward is 1 if and only if the answer is every digit, in the order of the keys, however they
were found. Levels are rows of LEVELS: how many keys there are. A lookup takes as long as the task's
seed says, log-normal: all rollouts of a task wait alike. Held-out tasks do not wait, which changes
nothing that the model sees.

Level 0 has 65,000 contents. The script of the warm start asks for one key a reply in four of five
episodes, for all of them in the others, and wins as often either way.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase, digits
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import saying
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.tasks import hop, hop_slow
from forge_jax.agents.white_box import ToolLoop, tool_message
from forge_jax.types import Task

LEVELS = (2, 3, 4)  # keys
MAX_TURNS = 6
MAX_TOKENS = 12  # of one reply; four calls and its end take as many
MEAN, SIGMA, LONGEST = 0.25, 0.5, 1.0  # seconds of a lookup, log-normal and cut off
SLOWNESS = 0x6A7  # in the seed of how long a task's lookups take
ABSENT = "-"
LOOKUP = hop.lookup_tool("Looks up a key: its digit, - where there is none.")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What the script does with what chance; the default wins 0.6 of its episodes."""

    early: float = 0.4  # stops asking before it has all values, and answers - for the others
    parallel: float = 0.2  # asks for all that it asks for in one reply


NOISE = Noise()


@dataclass(frozen=True)
class Gather:
    """The world of one content."""

    content: str  # letters, then as many digits
    seconds: float = 0.0  # of every lookup

    @property
    def keys(self) -> str:
        return self.content[: len(self.content) // 2]

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"W{self.keys}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (LOOKUP,)

    def look_up(self, key: str) -> str:
        """The digit of a key, ABSENT where there is none."""
        values = self.content[len(self.keys) :]
        return dict(zip(self.keys, values, strict=True)).get(key, ABSENT)

    def answer(self, known: str) -> str:
        """The answer of who has the values of the keys `known`, ABSENT for any other."""
        values = [self.look_up(key) if key in known else ABSENT for key in self.keys]
        return "!" + "".join(values)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall, at once, unless it is a lookup of a text."""
        key = hop.key_of(name, arguments)
        await asyncio.sleep(self.seconds)
        return self.look_up(key)

    async def score(self, answer: str) -> float:
        return float(answer == self.answer(self.keys))


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """Random keys and values of a level."""
    keys = rng.permutation(list(ascii_lowercase))[: LEVELS[level]]
    return "".join([*keys, *rng.choice(list(digits), LEVELS[level])])


def seconds_of(task: Task) -> float:
    """How long a lookup of a task takes."""
    return hop_slow.drawn_seconds(task, SLOWNESS, MEAN, SIGMA, LONGEST)


def world_of(task: Task) -> Gather:
    """The world that a task's family, split, seed and level make."""
    content = content_of(task, partial(draw, level=level_of(task, len(LEVELS))))
    return Gather(content, seconds_of(task))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)


def play(
    rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on random training content."""
    return script(Gather(draw_from("train", partial(draw, level=level), rng)), rng, noise)


def script(world: Gather, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Asks for all keys, or for fewer, one a reply or at once, as `noise` says; then answers."""
    early = rng.random() < noise.early
    asked = world.keys[: rng.integers(len(world.keys))] if early else world.keys
    replies = [asked] if asked and rng.random() < noise.parallel else list(asked)
    context = Context().append(*world.messages)
    calls: list[ScriptedCall] = []
    for keys in replies:
        reply = _asking(keys)
        calls.append(ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        found = [tool_message(f"call_{i}", world.look_up(key)) for i, key in enumerate(keys)]
        context = context.append(reply, *found)
    last = saying(world.answer(asked))
    return (*calls, ScriptedCall(messages=context.messages, tools=world.tools, reply=last))


def _asking(keys: Sequence[str]) -> Message:
    """A reply that looks up several keys."""
    functions = [{"name": "lookup", "arguments": json.dumps({"key": key})} for key in keys]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "tool_calls": calls}
