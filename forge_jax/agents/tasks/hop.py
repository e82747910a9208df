"""hop: follow two to four hidden lookups with a tool, then answer the digit at their end.

A seed makes a chain of distinct letters that ends in a digit, "ilb3". The model is told
the first letter and must look up each next one:

    Qi   ?i   =l   ?l   =b   ?b   =3   !3

A chain of h letters takes h + 1 calls and 6h + 6 characters. The reward is 1 if and only
if the answer is right; an agent that does not answer within MAX_TURNS gets 0.

There are 6,500, 156,000 and 3.6 million chains of 2, 3 and 4 letters. Held-out chains
are never trained on, though their letters and single steps are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Any, Protocol

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import content_of, draw_from
from forge_jax.agents.white_box import ToolLoop, tool_message
from forge_jax.types import Task

MAX_TURNS = 6
MAX_TOKENS = 4  # of one reply; "?i" and its end take three
ABSENT = "-"


def lookup_tool(description: str) -> Tool:
    """A tool that takes a key."""
    schema = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    function = {"name": "lookup", "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def key_of(name: str, arguments: Mapping[str, Any]) -> str:
    """The key of a call. Raises BadCall unless it is a lookup of a text."""
    key = arguments.get("key")
    if name != "lookup" or not isinstance(key, str):
        raise BadCall(f"no tool {name} with {sorted(arguments)}; use lookup with a text key")
    return key


LOOKUP = lookup_tool("Looks up a key: the next key, a digit at the end, - where there is none.")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs before it has the digit; the default wins 0.65 of its episodes.

    Even its errors copy what was found wherever they can: a script that guesses digits
    teaches the model to answer a digit other than the one it has just read.
    """

    early: float = 0.13  # answers the letter it has
    wrong: float = 0.05  # looks up a random letter


NOISE = Noise()


class Chain(Protocol):
    """What the script needs of a world."""

    @property
    def chain(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    def look_up(self, key: str) -> str: ...

    def answer(self, known: str) -> str: ...


@dataclass(frozen=True)
class Hop:
    """The world of one chain."""

    chain: str  # letters, then a digit

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"Q{self.chain[0]}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (LOOKUP,)

    def look_up(self, key: str) -> str:
        """What comes after `key`, ABSENT where nothing does."""
        return dict(zip(self.chain, self.chain[1:], strict=False)).get(key, ABSENT)

    def answer(self, known: str) -> str:
        """The answer of who takes `known` for the digit."""
        return f"!{known}"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is a lookup of a text."""
        return self.look_up(key_of(name, arguments))

    async def score(self, answer: str) -> float:
        return float(answer == self.answer(self.chain[-1]))


def draw(rng: np.random.Generator) -> str:
    """A random chain."""
    letters = rng.permutation(list(ascii_lowercase))[: rng.integers(2, 5)]
    return "".join(letters) + digits[rng.integers(len(digits))]


def world_of(task: Task) -> Hop:
    """The world that a task's family, split and seed make."""
    return Hop(content_of(task, draw))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)


def play(rng: np.random.Generator, noise: Noise = NOISE) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training chain."""
    return script(Hop(draw_from("train", draw, rng)), rng, noise)


def script(
    world: Chain, rng: np.random.Generator, noise: Noise, turns: int = MAX_TURNS
) -> tuple[ScriptedCall, ...]:
    """Follows the chain, erring as `noise` says; a lookup that finds nothing is tried again."""
    context = Context().append(*world.messages)
    calls: list[ScriptedCall] = []
    known = world.chain[0]
    while len(calls) < turns:
        reply = _reply(world, known, rng, noise)
        calls.append(ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        if "tool_calls" not in reply:
            break
        call = reply["tool_calls"][0]
        found = world.look_up(json.loads(call["function"]["arguments"])["key"])
        context = context.append(reply, tool_message(call["id"], found))
        known = known if found == ABSENT else found
    return tuple(calls)


def _reply(world: Chain, known: str, rng: np.random.Generator, noise: Noise) -> Message:
    """The script's next move, when `known` is the last thing it found."""
    luck = rng.random()
    if known in digits or luck < noise.early:
        return {"role": "assistant", "content": world.answer(known)}
    lost = luck < noise.early + noise.wrong
    key = ascii_lowercase[rng.integers(len(ascii_lowercase))] if lost else known
    function = {"name": "lookup", "arguments": json.dumps({"key": key})}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
