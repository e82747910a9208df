"""How long items take: models of latency, and what a data pool has measured.

Parameters or recorded episodes flow in, arrays of items flow out. The invariant: a model's draws
are positive and finite and have its mean, so that models compare at equal supply.

An item is in service for its compute seconds on an instance, then for its tool seconds elsewhere.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forge_jax.config import UserError, check
from forge_jax.types import Episode

SURE = 1e-9  # of a share


class Latency(Protocol):
    """A distribution of seconds."""

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """f64[count], seconds > 0."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        check(0 < value < math.inf, f"{name}={value} must be a number > 0")


@dataclass(frozen=True, kw_only=True)
class Light:
    """Hardly any spread: uniform within `spread` of the mean."""

    mean: float = 1.0
    spread: float = 0.2

    def __post_init__(self) -> None:
        _positive(mean=self.mean)
        check(0 <= self.spread < 1, f"spread={self.spread} must be in [0, 1)")

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.mean * rng.uniform(1 - self.spread, 1 + self.spread, count)


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """Lengths of generated text: many short, some long."""

    mean: float = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _positive(mean=self.mean, sigma=self.sigma)

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.mean * rng.lognormal(-(self.sigma**2) / 2, self.sigma, count)


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """A heavy tail: the share that takes longer than x falls as a power of x."""

    mean: float = 1.0
    alpha: float = 1.5

    def __post_init__(self) -> None:
        _positive(mean=self.mean)
        check(1 < self.alpha < math.inf, f"alpha={self.alpha} must be above 1, to have a mean")

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        least = self.mean * (self.alpha - 1) / self.alpha
        return least * (1 + rng.pareto(self.alpha, count))


@dataclass(frozen=True, kw_only=True)
class Bimodal:
    """Tools: most are quick, a share takes `ratio` times as long (a build, a test suite)."""

    mean: float = 1.0
    share: float = 0.1
    ratio: float = 20.0

    def __post_init__(self) -> None:
        _positive(mean=self.mean, ratio=self.ratio)
        check(0 <= self.share <= 1, f"share={self.share} must be in [0, 1]")

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        quick = self.mean / (1 + self.share * (self.ratio - 1))
        slow = rng.random(count) < self.share
        return np.where(slow, self.ratio, 1.0) * quick * rng.uniform(0.8, 1.2, count)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds that were measured, drawn again with replacement."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check(len(self.seconds) > 0, "seconds=() must hold at least one measurement")
        for i, value in enumerate(self.seconds):
            check(0 < value < math.inf, f"seconds[{i}]={value} must be a number > 0")

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return rng.choice(np.asarray(self.seconds, np.float64), count)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One kind of work in a mixture."""

    name: str
    share: float  # of the items
    compute: Latency  # seconds alone on an instance
    tool: Latency | None = None  # seconds elsewhere; None: no tools
    tokens_per_second: float = 100.0  # sampled in the compute seconds

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, f"share={self.share} must be in (0, 1]")
        _positive(tokens_per_second=self.tokens_per_second)


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """Work in the order in which it is admitted."""

    compute: np.ndarray  # f64[n], seconds alone on an instance
    tool: np.ndarray  # f64[n], seconds elsewhere, after them
    length: np.ndarray  # f64[n], tokens sampled
    domain: np.ndarray  # i64[n], index into `names`
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def duration(self) -> np.ndarray:
        """f64[n], seconds in service on an idle fleet."""
        return self.compute + self.tool


def mixture(domains: Sequence[Domain], count: int, seed: int) -> Items:
    """`count` items of `domains` by their shares, which add up to 1, in random order."""
    shares = np.array([domain.share for domain in domains])
    if not domains or abs(shares.sum() - 1) > SURE:
        raise UserError(f"the shares {shares.tolist()} of the domains must add up to 1")
    rng = np.random.default_rng(seed)
    domain = rng.choice(len(domains), count, p=shares)
    compute, tool, length = np.zeros((3, count))
    for i, one in enumerate(domains):
        mine = np.flatnonzero(domain == i)
        compute[mine] = one.compute.draw(len(mine), rng)
        length[mine] = compute[mine] * one.tokens_per_second
        if one.tool is not None:
            tool[mine] = one.tool.draw(len(mine), rng)
    names = tuple(one.name for one in domains)
    return Items(compute=compute, tool=tool, length=length, domain=domain, names=names)


def recorded(groups: Iterable[Sequence[Episode]]) -> Items:
    """What was measured of groups of a data pool, each an item, domains by task family.

    A group takes as long as its slowest episode; of that, the time in calls is compute and the
    rest is tools. Groups without a call are left out. Raises UserError where none is left.
    """
    rows = [row for group in groups if (row := measured(group)) is not None]
    if not rows:
        raise UserError("no group has a call, so there is nothing measured to simulate")
    names = tuple(sorted({row[3] for row in rows}))
    compute, tool, length = np.array([row[:3] for row in rows], np.float64).T
    domain = np.array([names.index(row[3]) for row in rows])
    return Items(compute=compute, tool=tool, length=length, domain=domain, names=names)


def measured(group: Sequence[Episode]) -> tuple[float, float, float, str] | None:
    """Compute and tool seconds, tokens, and family of a group; None where it has no call.

    Compute is the time in calls of its slowest episode, what they wait for the engine included.
    """
    turns = [episode.turns for episode in group if episode.turns]
    if not turns:
        return None
    total, calls = max(
        (max(t.start + t.seconds for t in one), sum(t.seconds for t in one)) for one in turns
    )
    compute = min(calls, total)  # calls may run side by side
    length = sum(len(turn.output) for one in turns for turn in one)
    return max(compute, 1e-9), max(total - compute, 0.0), float(length), group[0].task.family
