"""What must hold of the record of any agent's session, whatever program the agent is.

The turns of a session and what its engine drew flow in; an account of every token flows out.
Invariant: each token drawn is in one turn, and is either trained or left out for one reason.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import numpy as np

from forge_jax.rl.credit import trainable, turn_sample
from forge_jax.types import Chunk, Engine, Finish, Request, Turn

ABANDONED, SUPPORT_LOST, UNTRAINABLE = "abandoned", "support lost", "untrainable"


class Counted:
    """An engine that remembers what it drew, for a record to be held against."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.drawn: list[tuple[np.ndarray, list[int]]] = []  # prompt and output of each request

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Implements `types.Engine`."""
        ids: list[int] = []
        chunks = cast("AsyncGenerator[Chunk, None]", self._engine.generate(request))
        async with aclosing(chunks):
            async for chunk in chunks:
                if not ids:
                    self.drawn.append((request.prompt, ids))
                ids += chunk.ids.tolist()
                yield chunk


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the tokens of a session went; its fields are tokens but for the first four."""

    calls: int
    samples: int  # turns that may be trained on
    branches: int  # turns that continue no earlier one
    roots: tuple[int, ...]  # their numbers
    sampled: int
    trained: int
    left_out: Mapping[str, int]  # by reason


def account(turns: Sequence[Turn]) -> Account:
    """The account of a session's turns."""
    left_out: Counter[str] = Counter()
    trained = 0
    for turn in turns:
        if not trainable(turn):
            reason = ABANDONED if turn.finish is Finish.ABORT else UNTRAINABLE
            left_out[reason] += len(turn.output)
            continue
        used = int(turn_sample(turn, 1.0).mask.sum())
        trained += used
        left_out[SUPPORT_LOST] += len(turn.output) - used
    roots = tuple(number for number, turn in enumerate(turns) if turn.parent is None)
    return Account(
        calls=len(turns),
        samples=sum(map(trainable, turns)),
        branches=len(roots),
        roots=roots,
        sampled=sum(len(turn.output) for turn in turns),
        trained=trained,
        left_out={reason: count for reason, count in left_out.items() if count},
    )


def broken(turns: Sequence[Turn], drawn: Sequence[tuple[np.ndarray, list[int]]]) -> list[str]:
    """The laws that a session's record breaks, in words; none if all hold.

    `drawn` are prompt and output of every request whose engine drew tokens.
    """
    faults = []
    made = Counter((tuple(prompt.tolist()), tuple(output)) for prompt, output in drawn)
    kept = Counter(
        (tuple(turn.prompt.tolist()), tuple(turn.output.tolist()))
        for turn in turns
        if len(turn.output)
    )
    if made != kept:
        lost, more = (made - kept).total(), (kept - made).total()
        faults.append(f"{lost} completions drawn are not recorded, {more} recorded were not drawn")
    told = account(turns)
    if told.sampled != told.trained + sum(told.left_out.values()):
        faults.append(f"tokens are neither trained nor left out: {told}")
    for number, turn in enumerate(turns):
        if turn.parent is None:
            continue
        before = turns[turn.parent]
        whole = np.concatenate([before.prompt, before.output])
        if not np.array_equal(turn.prompt[: len(whole)], whole):
            faults.append(f"turn {number} does not begin with its parent, turn {turn.parent}")
    same = Counter(
        (tuple(turn.prompt.tolist()), tuple(turn.output.tolist()))
        for turn in turns
        if trainable(turn)
    )
    twice = sum(count - 1 for count in same.values())
    if twice:
        faults.append(f"{twice} samples are trained on twice")
    return faults
