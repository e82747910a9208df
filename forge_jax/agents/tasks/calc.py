"""calc: work out an expression of whole numbers with a calculator that does one operation a call.

A seed makes an expression, and its value is to be answered. The calculator takes two numbers and
one operator, so products come first, then sums from left to right:

    Q5+7*8   ?7*8   =56   ?5+56   =61   !61

An expression of n operations takes n + 1 calls. The reward is 1 if and only if the answer is the
value; how it was found does not matter. Levels are rows of LEVELS: how many operations there are,
and how large the numbers.

Level 0 has 3,000 expressions of two operations. Held-out expressions are never trained on, though
their single steps are.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.white_box import ToolLoop, tool_message
from forge_jax.types import Task

LEVELS = ((2, 9), (3, 20), (4, 99))  # operations, and the largest number at the start
MAX_TURNS = 6
MAX_TOKENS = 24  # of one reply
DIGITS = 12  # of a number that the calculator takes
OPERATIONS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {"*": operator.mul, "+": operator.add, "-": operator.sub}
)
TERM = re.compile(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*")
CALCULATE: Tool = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Does one operation, + - or *, on two whole numbers, for example 7*8.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs at a call; the default wins about 0.6 of its level 0 episodes."""

    early: float = 0.2  # answers the number it found last, though operations are left
    wrong: float = 0.2  # takes another operator


NOISE = Noise()


@dataclass(frozen=True)
class Calc:
    """The world of one expression."""

    expression: str  # numbers and operators in turn, without spaces

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"Q{self.expression}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (CALCULATE,)

    @property
    def value(self) -> int:
        parts = parts_of(self.expression)
        while len(parts) > 1:
            parts = reduced(parts, calculated("".join(parts[slice(*next_step(parts))])))
        return int(parts[0])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is one operation on two whole numbers."""
        expression = arguments.get("expression")
        if name != "calculate" or not isinstance(expression, str):
            raise BadCall(f"no tool {name} with {sorted(arguments)}; use calculate with a text")
        return calculated(expression)

    async def score(self, answer: str) -> float:
        return float(answer == f"!{self.value}")


def calculated(expression: str) -> str:
    """The value of one operation, for example "7*8". Raises BadCall on anything else."""
    found = TERM.fullmatch(expression)
    if found is None:
        raise BadCall(f"{expression[:40]!r} is not one operation on two whole numbers, like 7*8")
    left, sign, right = found.groups()
    if max(len(left), len(right)) > DIGITS:
        raise BadCall(f"numbers of more than {DIGITS} digits are too large")
    return str(OPERATIONS[sign](int(left), int(right)))


def parts_of(expression: str) -> list[str]:
    """Numbers and operators in turn."""
    return re.findall(r"\d+|[-+*]", expression)


def next_step(parts: list[str]) -> tuple[int, int]:
    """Where the next operation begins and ends: the first product, else the first sum."""
    at = parts.index("*") if "*" in parts else 1
    return at - 1, at + 2


def reduced(parts: list[str], found: str) -> list[str]:
    """The parts with the next operation replaced by what it came to."""
    start, stop = next_step(parts)
    return [*parts[:start], found, *parts[stop:]]


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """A random expression of a level."""
    operations, largest = LEVELS[level]
    numbers = [str(n) for n in rng.integers(1, largest + 1, size=operations + 1)]
    signs = rng.choice(list(OPERATIONS), size=operations)
    return numbers[0] + "".join(s + n for s, n in zip(signs, numbers[1:], strict=True))


def world_of(task: Task) -> Calc:
    """The world that a task's family, split, seed and level make."""
    return Calc(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)


def play(
    rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training expression."""
    return script(Calc(draw_from("train", partial(draw, level=level), rng)), rng, noise)


def script(world: Calc, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Reduces the expression operation by operation, erring as `noise` says."""
    context = Context().append(*world.messages)
    calls: list[ScriptedCall] = []
    parts, known = parts_of(world.expression), ""
    while True:
        early = known and rng.random() < noise.early
        if len(parts) == 1 or early:
            reply: Message = {"role": "assistant", "content": f"!{known}"}
            return (*calls, ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        left, sign, right = parts[slice(*next_step(parts))]
        if rng.random() < noise.wrong:
            sign = str(rng.choice(list(OPERATIONS)))
        reply = _call(left + sign + right)
        calls.append(ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        known = calculated(left + sign + right)
        context = context.append(reply, tool_message("call_0", known))
        parts = reduced(parts, known)


def _call(expression: str) -> Message:
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
