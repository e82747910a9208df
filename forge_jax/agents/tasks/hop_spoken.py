"""hop_spoken: hop by an agent that talks, in the wrong language now and then, and calls badly.

A chain is one of `hop`, and is followed with the tools `get` and `back`. A call may carry a word
beside its key, an answer a word behind its digit:

    Qi   ?get i so   =l   ?get l thus   =3   !3 then

The reward is 1 if and only if the digit is right: words are worth nothing, and neither is their
language. The script mixes in words in other letters, and before a call that is right it makes bad
ones, of tools that are not there or without a key. Both are what a policy starts with that imitates
it. There are turns enough for them: a bad call costs no reward but the call itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import calling, saying
from forge_jax.agents.split import content_of, draw_from
from forge_jax.agents.tasks import hop
from forge_jax.agents.white_box import ToolLoop, tool_message
from forge_jax.types import Task

MAX_TURNS = 9
MAX_TOKENS = 16  # of one reply; a bad call with a word in other letters takes 15
WORDS = ("so", "then", "thus")
FOREIGN = ("так", "άρα", "所以")  # the same
ABSENT_TOOLS = ("ask", "find")
UNKNOWN, NO_KEY = "unknown", "no key"  # what a bad call is told


def _tool(name: str, description: str) -> Tool:
    properties = {"key": {"type": "string"}, "word": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["key"]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get", "What comes after a key: the next key, a digit at the end, - for nothing."),
    _tool("back", "What comes before a key, - for nothing."),
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins about 0.6 of its episodes."""

    early: float = 0.13  # answers the letter it has
    wrong: float = 0.05  # looks up a random letter
    foreign: float = 0.35  # says its word in other letters
    bad: float = 0.25  # calls badly, half of the time a tool that is not there, else without a key


NOISE = Noise()


@dataclass(frozen=True)
class SpokenHop:
    """The world of one chain."""

    chain: str  # letters, then a digit

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"Q{self.chain[0]}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return TOOLS

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is one of the tools with a text for a key."""
        if name not in ("get", "back"):
            raise BadCall(UNKNOWN)
        key = arguments.get("key")
        if not isinstance(key, str):
            raise BadCall(NO_KEY)
        chain = self.chain if name == "get" else self.chain[::-1]
        return hop.Hop(chain).look_up(key)

    async def score(self, answer: str) -> float:
        return float(answer.split(" ")[0] == f"!{self.chain[-1]}")


def draw(rng: np.random.Generator) -> str:
    """A random chain, as in `hop`."""
    return hop.draw(rng)


def world_of(task: Task) -> SpokenHop:
    """The world that a task's family, split and seed make."""
    return SpokenHop(content_of(task, draw))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)


def play(rng: np.random.Generator, noise: Noise = NOISE) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training chain."""
    return script(SpokenHop(draw_from("train", draw, rng)), rng, noise)


def script(world: SpokenHop, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Follows the chain, erring as `noise` says; what finds nothing is tried again."""
    context = Context().append(*world.messages)
    calls: list[ScriptedCall] = []
    known = world.chain[0]
    while len(calls) < MAX_TURNS:
        reply, found = _move(world, known, rng, noise)
        calls.append(ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        if found is None:
            break
        context = context.append(reply, tool_message("call_0", found))
        known = found if found in world.chain else known
    return tuple(calls)


def _move(
    world: SpokenHop, known: str, rng: np.random.Generator, noise: Noise
) -> tuple[Message, str | None]:
    """The script's next reply, when `known` is the last thing it found, and what it gets for it:
    nothing for an answer."""
    word = str(rng.choice(FOREIGN if rng.random() < noise.foreign else WORDS))
    luck = rng.random()
    if known in digits or luck < noise.early:
        return saying(f"!{known} {word}"), None
    if rng.random() < noise.bad:
        if rng.random() < 0.5:
            return calling("get", {}), NO_KEY
        name = str(rng.choice(ABSENT_TOOLS))
        return calling(name, {"key": known, "word": word}), UNKNOWN
    lost = luck < noise.early + noise.wrong
    key = ascii_lowercase[rng.integers(len(ascii_lowercase))] if lost else known
    return calling("get", {"key": key, "word": word}), hop.Hop(world.chain).look_up(key)
