"""How many tokens to draft, from what drafts and calls have come to so far.

How many drafts were accepted and how long calls took flow in, the depth of the next call flows
out; no clock, no device. Invariant: depths are chosen by measured tokens a second alone, so a
drafter that guesses badly is not asked any more but for probes, which get rarer.

A verify of depth γ samples ``E = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_γ`` tokens, a_i the share
of the i-th drafts that are accepted where those before them were; with one a that is
``(1 - a^(γ+1)) / (1 - a)`` (arXiv 2211.17192, equation 1). Of the same rows it takes
``c(rows, γ)`` seconds, and γ is chosen where E / c is largest.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

HALF = 512  # drafts after which older ones count half
DOUBT = 4  # drafts' worth of belief that a depth guesses as well as the one before it
TRIALS = 5  # timed calls before a depth is judged
RECENT = 16  # timed calls whose lower quartile is the cost: what disturbs a call makes it longer
GAIN = 1.05  # what another depth must win over the present one
PROBE, RAREST = 32, 512  # calls between probes, at first and at most


@dataclass(eq=False, slots=True)
class _Bucket:
    """What is known of calls of one number of rows."""

    seconds: dict[int, deque[float]] = field(default_factory=dict)  # of a verify, by depth
    calls: int = 0  # since the last probe
    wait: int = PROBE
    best: int = 0
    next: int = 0  # whose turn a probe is


class DepthController:
    """Owns the measurements; acceptance is the drafter's, costs are those of a bucket of rows."""

    def __init__(self, depths: Sequence[int]):
        """`depths` are those that are compiled, 0 among them, ascending."""
        if not depths or depths[0] != 0 or sorted(set(depths)) != list(depths):
            raise ValueError(f"{depths=} must begin with 0 and ascend")
        self._depths = tuple(depths)
        self._tried = [0.0] * depths[-1]
        self._accepted = [0.0] * depths[-1]
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def choose(self, rows: int, ready: bool = True) -> int:
        """The depth of the next call of a bucket of `rows`. Where the drafter is not `ready` for
        any of them, there is nothing to learn from drafting and none is tried."""
        bucket = self._buckets[rows]
        best = self._best(rows)
        if best != bucket.best:
            bucket.best, bucket.wait = best, PROBE
        if not ready:
            return best
        untimed = self._untimed(bucket)
        if untimed is not None:
            return untimed
        bucket.calls += 1
        if bucket.calls < bucket.wait:
            return best
        bucket.calls, bucket.wait = 0, min(2 * bucket.wait, RAREST)
        others = [depth for depth in self._depths if depth != best]
        bucket.next += 1
        return others[bucket.next % len(others)]

    def observe(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes in how many drafts of each place were checked, those before them having been
        accepted, and how many of them were accepted."""
        for i, (n, k) in enumerate(zip(tried, accepted, strict=True)):
            fades = 0.5 ** (n / HALF)
            self._tried[i] = self._tried[i] * fades + n
            self._accepted[i] = self._accepted[i] * fades + k

    def time(self, rows: int, depth: int, seconds: float) -> None:
        """Takes in the seconds of one verify in a call of this shape."""
        timed = self._buckets[rows].seconds.setdefault(depth, deque(maxlen=RECENT))
        timed.append(seconds)

    def acceptance(self) -> tuple[float, ...]:
        """a_i of every place; of one that was hardly tried close to that of the place before it,
        and 1 of the first."""
        rates, before = [], 1.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            before = (accepted + DOUBT * before) / (tried + DOUBT)
            rates.append(before)
        return tuple(rates)

    def expected(self, depth: int) -> float:
        """Tokens of a verify of this depth."""
        total, all_before = 1.0, 1.0
        for rate in self.acceptance()[:depth]:
            all_before *= rate
            total += all_before
        return total

    def speedup(self, rows: int, depth: int) -> float | None:
        """Tokens a second with drafts over those without; None before both are timed."""
        seconds = self._buckets[rows].seconds
        if not seconds.get(0) or not seconds.get(depth):
            return None
        gain = _typical(seconds[0]) / _typical(seconds[depth])
        return self.expected(depth) * gain

    def speedups(self) -> dict[int, float]:
        """That of the depth chosen last, of every bucket that is timed; 1 where none drafts."""
        found = {rows: self.speedup(rows, b.best) for rows, b in self._buckets.items()}
        return {rows: gain for rows, gain in found.items() if gain is not None}

    def _best(self, rows: int) -> int:
        """The depth before, unless another is clearly better or drafting does not pay."""
        gains = {depth: self.speedup(rows, depth) or 0.0 for depth in self._depths[1:]} | {0: 1.0}
        depth, now = max(gains, key=gains.__getitem__), self._buckets[rows].best
        return depth if gains[depth] > GAIN * gains[now] or gains[now] < 1 else now

    def _untimed(self, bucket: _Bucket) -> int | None:
        return next(
            (d for d in self._depths if len(bucket.seconds.get(d, ())) < TRIALS),
            None,
        )


def _typical(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
