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

from forge_jax.rl.credit import group_samples, left_out, trainable
from forge_jax.types import (
    Branch,
    Chunk,
    Engine,
    Episode,
    Lineage,
    Outcome,
    Request,
    Rule,
    Status,
    Task,
    Turn,
)


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
    """Where the tokens of a session go in an episode that is trained on."""

    calls: int
    samples: int  # calls that are trained on
    branches: tuple[str, ...]  # of each call, `types.Branch`: why it begins one, or "continue"
    replies: Mapping[str, int]  # assistant messages that came back, by how they were known
    sampled: int  # tokens, as the next two
    trained: int
    left_out: Mapping[str, int]  # by reason


def account(turns: Sequence[Turn]) -> Account:
    """The account of a session's turns, whose episode did better than another of its group."""
    group = [_episode(1.0, turns), _episode(0.0, ())]
    rules = sum((Counter(known(turn).replies) for turn in turns), Counter[Rule]())
    samples = [sample for sample, _ in group_samples(group)]
    return Account(
        calls=len(turns),
        samples=len(samples),
        branches=tuple(str(known(turn).branch) for turn in turns),
        replies={str(rule): count for rule, count in rules.items()},
        sampled=sum(len(turn.output) for turn in turns),
        trained=sum(int(sample.mask.sum()) for sample in samples),
        left_out={str(reason): count for reason, count in left_out(group).items() if count},
    )


def known(turn: Turn) -> Lineage:
    """How a turn that a gateway recorded came out of those before it."""
    assert turn.lineage is not None
    return turn.lineage


def _episode(reward: float, turns: Sequence[Turn]) -> Episode:
    return Episode(
        item=0,
        replica=0,
        task=Task(family="client", seed=0),
        outcome=Outcome(status=Status.COMPLETED, reward=reward),
        turns=tuple(turns),
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
        branch = known(turn).branch
        # Others may have a parent too: what goes on from it a second time, or again.
        if turn.parent is None and branch is Branch.CONTINUE:
            faults.append(f"turn {number} is said to continue, and has no parent")
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
