"""How what is trained differs from what was admitted, and how late it is.

A simulation flows in, plain numbers flow out. A skew compares a stretch of the consumed items with
the stretch of the admitted ones that has the same place in the run: the difference of their means
over the mean of all items. The invariant: strict FIFO has no skew anywhere, and what biases the
start of a run only is told apart from what lasts.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from forge_jax.sched.latency import Items
from forge_jax.sched.played import Played

START = 0.2  # share of the consumed items that is the start of a run
STRETCHES = 20  # of a run, over which a skew that comes and goes is measured


@dataclass(frozen=True, kw_only=True)
class Report:
    """One policy on one workload."""

    items_per_second: float  # trained, after the start
    tokens_per_second: float
    trainer_idle: float
    place_idle: float
    instance_idle: float
    lag_mean: float  # in items
    lag_p99: float
    lag_max: int
    updates_mean: float  # lag in updates, after the start
    updates_p99: float
    updates_max: int
    skew_start: float  # of seconds in service, at the start
    skew_duration: float  # ... after it
    skew_waves: float  # ... in one of the `STRETCHES`, root mean square
    skew_length: float  # of sampled tokens, after it
    skew_domain: float  # largest difference of a domain's share of items, after it
    given_up: float  # share of the items that ended without being trained


def report(items: Items, played: Played) -> Report:
    """What a simulation came to. Raises ValueError where it trained on too little to tell."""
    consumed = len(played.item)
    start = int(START * consumed)
    rest = np.flatnonzero(~played.failed & (np.arange(consumed) >= start))
    if start < 1 or len(rest) < 2 or played.time[rest[-1]] <= played.time[rest[0]]:
        raise ValueError(f"{consumed} consumed items are too few for a report")
    seconds = played.time[rest[-1]] - played.time[rest[0]]
    skews = _skews(items, played, start, consumed)
    return Report(
        items_per_second=len(rest) / float(seconds),
        tokens_per_second=float(items.length[played.item[rest]].sum() / seconds),
        trainer_idle=played.trainer_idle,
        place_idle=played.place_idle,
        instance_idle=played.instance_idle,
        lag_mean=float(played.lag.mean()),
        lag_p99=float(np.quantile(played.lag, 0.99)),
        lag_max=int(played.lag.max()),
        updates_mean=float(played.updates[rest].mean()),
        updates_p99=float(np.quantile(played.updates, 0.99)),
        updates_max=int(played.updates.max()),
        skew_start=_skews(items, played, 0, start)[0],
        skew_duration=skews[0],
        skew_waves=float(np.sqrt(np.mean(over_time(items, played, STRETCHES)["duration"] ** 2))),
        skew_length=skews[1],
        skew_domain=skews[2],
        given_up=1 - float((~played.failed).sum()) / (consumed + len(played.evicted)),
    )


def over_time(items: Items, played: Played, slices: int) -> dict[str, np.ndarray]:
    """f64[slices] each, of equal numbers of consumed items: `time` at their end, the skews, and
    the largest lag in items."""
    edges = np.linspace(0, len(played.item), min(slices, len(played.item)) + 1).astype(int)
    rows = [
        (played.time[end - 1], *_skews(items, played, begin, end), played.lag[begin:end].max())
        for begin, end in itertools.pairwise(edges)
    ]
    names = ("time", "duration", "length", "domain", "lag")
    return dict(zip(names, np.array(rows, np.float64).T, strict=True))


def _skews(items: Items, played: Played, begin: int, end: int) -> tuple[float, float, float]:
    """Of duration, length and domain, over the consumed items [begin, end) that did not fail."""
    taken = played.item[begin:end][~played.failed[begin:end]]
    scale = 1 + len(played.evicted) / len(played.item)  # what was admitted for each consumed
    given = played.admitted[round(begin * scale) : round(end * scale)]
    if not len(taken) or not len(given):
        return 0.0, 0.0, 0.0
    share = [
        np.bincount(items.domain[x], minlength=len(items.names)) / len(x) for x in (taken, given)
    ]
    return (
        _skew(items.duration, taken, given),
        _skew(items.length, taken, given),
        float(np.abs(share[0] - share[1]).max()),
    )


def _skew(values: np.ndarray, taken: np.ndarray, given: np.ndarray) -> float:
    mean = values.mean()
    return float((values[taken].mean() - values[given].mean()) / mean) if mean > 0 else 0.0
