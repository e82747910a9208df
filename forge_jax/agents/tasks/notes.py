"""notes: remember four digits, seen one at a time, through wiped contexts.

In each window the model is told its own note and one digit, and its reply is the next
note; then the context is wiped. In the last window it is told only its note and must
answer it:

    P----,1 1---   P1---,2 12--   P12--,7 127-   P127-,3 1273   T1273 !1273

Each window is a call with a prompt of its own; all five share the episode's one reward,
which is 1 if and only if the answer is the four digits.

There are only 10,000 contents. The held-out eighth is never trained on as a whole, but
training soon meets every single window of it: this family tests that memory works
through the note, not that anything generalises.
"""

from dataclasses import dataclass
from string import digits

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.protocol import Message, ScriptedCall
from forge_jax.agents.split import content_of, draw_from
from forge_jax.agents.white_box import WindowLoop
from forge_jax.types import Task

SLOTS = 4
EMPTY = "-"
MAX_TOKENS = 8  # of one reply; "!1273" and its end take six


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default lets it win about 0.6 of its episodes.

    Its error copies too: a script that notes random digits teaches the model to misread.
    """

    forget: float = 0.11  # leaves the note as it was


NOISE = Noise()


@dataclass(frozen=True)
class Notes:
    """The world of four digits."""

    seen: str

    @property
    def windows(self) -> int:
        return SLOTS + 1

    def observe(self, window: int, note: str) -> tuple[Message, ...]:
        """The note, and the window's digit in every window but the last."""
        note = self.keep(note)
        text = f"P{note},{self.seen[window]}" if window < SLOTS else f"T{note}"
        return ({"role": "user", "content": text},)

    def keep(self, reply: str) -> str:
        """A reply, cut or filled up to the slots there are."""
        return reply[:SLOTS].ljust(SLOTS, EMPTY)

    async def score(self, answer: str) -> float:
        return float(answer == f"!{self.seen}")


def draw(rng: np.random.Generator) -> str:
    """Four random digits."""
    return "".join(digits[i] for i in rng.integers(len(digits), size=SLOTS))


def world_of(task: Task) -> Notes:
    """The world that a task's family, split and seed make."""
    return Notes(content_of(task, draw))


def agent() -> WindowLoop:
    """An agent for tasks of this family."""
    return WindowLoop(start=world_of, max_tokens=MAX_TOKENS)


def play(rng: np.random.Generator, noise: Noise = NOISE) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on random training digits."""
    return script(Notes(draw_from("train", draw, rng)), rng, noise)


def script(world: Notes, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Writes each digit into the first empty slot unless it forgets to, and answers its note."""
    context = Context()
    calls: list[ScriptedCall] = []
    for window in range(world.windows):
        context = context.append(*world.observe(window, context.note))
        note = world.keep(context.note)
        if window == world.windows - 1:
            text = f"!{note}"
        elif rng.random() < noise.forget:
            text = note
        else:
            text = note.replace(EMPTY, world.seen[window], 1)
        reply = {"role": "assistant", "content": text}
        calls.append(ScriptedCall(messages=context.messages, tools=(), reply=reply))
        context = context.wipe(world.keep(text))
    return tuple(calls)
