"""How long an episode took, and what that is worth beside siblings, the successful ones or all.

Intervals of calls go in, seconds and rewards in [0, 1] come out. The invariant: waiting for the
engine costs nothing, and what runs at once is counted once, so parallel calls are faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.types import Finish, Turn

AS_FAST = 0.5  # the reward of an episode as fast as its siblings, or the only one to succeed

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds from an episode's first call to the end of its last, each in one of three."""

    inference: float  # a call was computed
    queue: float  # none was, but one waited for the engine, or was abandoned
    between: float  # no call was open: tools, and the agent itself

    @property
    def completion(self) -> float:
        """What the speed reward is of: all but the queue."""
        return self.inference + self.between


def times_of(turns: Sequence[Turn]) -> Times:
    """Where the time of an episode went; overlapping calls are counted once."""
    if not turns:
        return Times(inference=0.0, queue=0.0, between=0.0)
    computed = [
        (t.start + min(t.queue_seconds, t.seconds), t.start + t.seconds)
        for t in turns
        if t.finish is not Finish.ABORT
    ]
    open_ = [(t.start, t.start + t.seconds) for t in turns]
    inference, covered = union(computed), union(open_)
    span = max(end for _, end in open_) - min(begin for begin, _ in open_)
    between = max(0.0, span - covered)
    return Times(inference=inference, queue=max(0.0, covered - inference), between=between)


def union(intervals: Sequence[Interval]) -> float:
    """Length of what the intervals cover together."""
    total, until = 0.0, -np.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def speed(seconds: float, reference: float) -> float:
    """``1 - x / 2`` of x = seconds / reference, in [0, 1]: 1/2 as fast, 0 from twice as long on."""
    if reference <= 0:
        return AS_FAST
    return min(1.0, max(0.0, 1.0 - seconds / reference / 2))


def speeds(seconds: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """Speed rewards f64[n, n] of siblings that took f64[n] `seconds`; bool[n] `paid`.

    [i, j] is that of j where nothing of i is known: j against the mean of the paid ones but i
    and j. So [i, i] is the reward of i itself, and the rest of row i does not depend on i.
    An episode that is not paid has 0, whatever it took.
    """
    n = len(seconds)
    rewards = np.zeros((n, n))
    for i in range(n):
        for j in np.flatnonzero(paid).tolist():
            others = paid.copy()
            others[i] = others[j] = False
            reference = float(seconds[others].mean()) if others.any() else 0.0
            rewards[i, j] = speed(float(seconds[j]), reference)
    return rewards
