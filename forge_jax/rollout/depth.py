"""How many tokens to draft, from what drafts and calls have come to so far.

How many drafts were accepted and how long calls took flow in, the depth of the next call flows
out; no clock, no device. Invariant: depths are chosen by measured tokens a second alone, so a
drafter that guesses badly is not asked any more but for probes, which get rarer.

A verify of depth γ samples ``E = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_γ`` tokens, a_i the share
of the i-th drafts that are accepted where those before them were; with one a that is
``(1 - a^(γ+1)) / (1 - a)`` (arXiv 2211.17192, equation 1). Of the same rows it takes ``r`` times
as long as one of depth 0, and γ is chosen where E / r is largest. The ratio is that of calls
right beside each other: those far apart differ by how long sequences are and by what else the
machine does. It is at least 1, since a verify of more tokens has more to do; so a drafter that
is never right cannot seem to pay, whatever disturbs the clock.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

HALF = 512  # drafts after which older ones count half
DOUBT = 4  # drafts' worth of belief that a depth guesses as well as the one before it
PAIRS = 2  # of calls side by side before a depth is judged
RECENT = 16  # pairs whose median is the cost: what disturbs a call lengthens it in either place
GAIN = 1.05  # what another depth must win over the present one
LEAST = 1.02  # what drafting must win over none to go on
FIRST, GROWTH, RAREST = 2, 1.25, 256  # calls between probes: at first, by each one, and at most
PROBE = 2  # calls of a probe: a request's first one has a prefill beside it and is not timed
CHANGED = 32  # ... at most where the best depth has changed


@dataclass(eq=False, slots=True)
class _Bucket:
    """What is known of calls of one number of rows."""

    ratios: dict[int, deque[float]] = field(default_factory=dict)  # to depth 0, by depth
    calls: int = 0  # since the last probe
    wait: float = FIRST
    best: int = 0
    next: int = 0  # whose turn a probe is
    probe: int = 0  # depth of the present one
    left: int = 0  # calls of it


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
        # Rows, depth and seconds of the newest call, if it was timed.
        self._last: tuple[int, int, float] | None = None

    def choose(self, rows: int, followed: float = 1.0) -> int:
        """The depth of the next call of a bucket of `rows`, where the drafter knows all tokens of
        a share `followed` of them. It guesses for the others in vain; where there is nobody else,
        there is nothing to learn from drafting and none is tried."""
        if not followed:
            return 0
        bucket = self._buckets[rows]
        best = self._best(rows, followed)
        if best != bucket.best:
            bucket.best, bucket.wait = best, min(bucket.wait, CHANGED)
        bucket.calls += 1
        if bucket.calls >= bucket.wait:
            bucket.calls, bucket.wait = 0, min(GROWTH * bucket.wait, RAREST)
            others = [depth for depth in self._depths if depth != best]
            bucket.next += 1
            bucket.probe, bucket.left = others[bucket.next % len(others)], PROBE
        if not bucket.left:
            return best
        bucket.left -= 1
        return bucket.probe

    def observe(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes in how many drafts of each place were checked, those before them having been
        accepted, and how many of them were accepted."""
        for i, (n, k) in enumerate(zip(tried, accepted, strict=True)):
            fades = 0.5 ** (n / HALF)
            self._tried[i] = self._tried[i] * fades + n
            self._accepted[i] = self._accepted[i] * fades + k

    def time(self, rows: int, depth: int, seconds: float) -> None:
        """Takes in the seconds of one verify in a call of this shape; calls come in order."""
        bucket = self._buckets[rows]
        if self._last is not None and self._last[0] == rows and self._last[1] != depth:
            self._pair(bucket, self._last[1:], (depth, seconds))
        self._last = (rows, depth, seconds)

    def apart(self) -> None:
        """A call came that is not timed: those before and behind it are not side by side."""
        self._last = None

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

    def cost(self, rows: int, depth: int) -> float | None:
        """Seconds of a verify over those of one of depth 0; None before enough pairs are timed."""
        if not depth:
            return 1.0
        ratios = self._buckets[rows].ratios.get(depth, ())
        return max(1.0, median(ratios)) if len(ratios) >= PAIRS else None

    def speedup(self, rows: int, depth: int) -> float | None:
        """Tokens a second with drafts over those without; None before it can be told."""
        cost = self.cost(rows, depth)
        return None if cost is None else self.expected(depth) / cost

    def speedups(self) -> dict[int, float]:
        """That of the depth chosen last, of every bucket; 1 where none drafts."""
        found = {rows: self.speedup(rows, b.best) for rows, b in self._buckets.items()}
        return {rows: gain for rows, gain in found.items() if gain is not None}

    def _best(self, rows: int, followed: float) -> int:
        """The depth before, unless another is clearly better or drafting does not pay."""
        gains = {}
        for depth in self._depths:
            cost, more = self.cost(rows, depth), self.expected(depth) - 1
            gains[depth] = 0.0 if cost is None else (1 + followed * more) / cost
        now = self._buckets[rows].best
        if now and gains[now] < LEAST:
            now = 0
        depth = max(gains, key=gains.__getitem__)
        return depth if gains[depth] > GAIN * gains[now] else now

    def _pair(self, bucket: _Bucket, one: tuple[int, float], two: tuple[int, float]) -> None:
        """What two calls side by side say of the cost of the deeper one, or of the one that is
        not the present choice where both drafted."""
        known, asked = sorted((one, two), key=lambda call: (call[0] != 0, call[0] != bucket.best))
        before = bucket.ratios.get(known[0], ())
        if known[0] and not before:
            return
        scale = median(before) if before else 1.0
        ratios = bucket.ratios.setdefault(asked[0], deque(maxlen=RECENT))
        ratios.append(scale * asked[1] / known[1])
