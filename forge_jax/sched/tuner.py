"""Picks N and W from measured latencies: the fastest within a lag budget and a skew budget.

Measured items and the trainer's pace flow in, sizes and the reasons for them flow out. The
invariant: the sizes picked keep the lag budget by their bound, for any order of finishing, and the
skew budget in the prediction; equal arguments give equal sizes.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.config import UserError, check
from forge_jax.sched.fleet import play
from forge_jax.sched.instances import FleetConfig
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.latency import Items
from forge_jax.sched.played import TrainerConfig
from forge_jax.sched.policies import Window, budget_window
from forge_jax.sched.queue import Deadline
from forge_jax.sched.skew import Report, report

CLOSE = 0.01  # of the best rate: what is this close is as good, and the least lag wins
SHARES = (0.0, 0.1, 0.3, 0.6, 1.0)  # of N, tried as W beside the widest that the budget allows


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What the sizes must keep, and how hard to look."""

    updates: int  # the largest lag allowed
    skew: float = 0.2  # the largest of seconds in service: what lasts, and what comes and goes
    most: int | None = None  # places that the fleet can hold; None: as many as the budget allows
    steps: int = 6  # numbers of places tried
    horizon: int = 150  # updates of each prediction
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.updates >= 1, f"updates={self.updates} must be at least 1")
        check(0 < self.skew < math.inf, f"skew={self.skew} must be a number > 0")
        check(self.most is None or self.most >= 1, f"most={self.most} must be at least 1")
        check(self.steps >= 1, f"steps={self.steps} must be at least 1")
        check(self.horizon >= 10, f"horizon={self.horizon} must be at least 10")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One pair of sizes and what is predicted of it."""

    in_flight: int
    window: int
    report: Report

    @property
    def skew(self) -> float:
        return max(self.report.skew_waves, abs(self.report.skew_duration))


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The sizes picked, and why."""

    in_flight: int
    window: int
    predicted: Report
    reasons: tuple[str, ...]


def tune(
    measured: Items,
    *,
    batch: int,
    train_seconds: float,
    cfg: TuneConfig,
    fleet: FleetConfig | None = None,
    deadline: Deadline | None = None,
    current: tuple[int, int] | None = None,
) -> Tuned:
    """The N and W of the fastest window that keeps both budgets.

    Every pair is simulated on the same draws from `measured`, on one instance without a limit where
    there is no `fleet`; `current` sizes stay where nothing is better. Raises UserError where no
    window keeps the lag budget, or none the skew budget.
    """
    most = cfg.updates * batch
    if cfg.most is not None:
        most = min(most, cfg.most)
    places = sorted({round(n) for n in np.geomspace(min(batch, most), most, cfg.steps)})
    drawn = redraw(measured, (cfg.horizon + cfg.updates) * batch + most, cfg.seed)

    def attempt(in_flight: int, window: int) -> Tried:
        policy = Window(in_flight=in_flight, window=window)
        lane = LaneConfig(name="all", policy=policy, deadline=deadline)
        trainer = TrainerConfig(seconds=train_seconds, updates=cfg.horizon)
        own = (tuple(range(len(drawn.names))),)
        lanes = Lanes([lane], batch=batch)
        done = play(drawn, lanes, own, fleet or FleetConfig(), trainer, seed=cfg.seed)
        return Tried(in_flight=in_flight, window=window, report=report(drawn, done))

    pairs = {(n, w): None for n in places for w in widths(n, batch, cfg.updates)}
    if current is not None and sum(current) <= cfg.updates * batch:
        pairs[current] = None
    return pick([attempt(n, w) for n, w in pairs], batch, cfg, current)


def widths(in_flight: int, batch: int, updates: int) -> list[int]:
    """The windows to try with N places under a lag budget, ascending."""
    widest = budget_window(in_flight, batch, updates)
    return sorted({min(int(share * in_flight), widest) for share in SHARES} | {widest})


def pick(
    tried: Sequence[Tried], batch: int, cfg: TuneConfig, current: tuple[int, int] | None = None
) -> Tuned:
    """The fastest of `tried` within the skew budget; of those as good, the current N and W if they
    are among them, else those of the least lag."""
    kept = [one for one in tried if one.skew <= cfg.skew]
    if not kept:
        least = min(tried, key=lambda one: one.skew)
        raise UserError(f"skew={cfg.skew}: the least that any window has is {least.skew:.3f}")
    best = max(kept, key=lambda one: one.report.items_per_second)
    enough = (1 - CLOSE) * best.report.items_per_second
    good = [one for one in kept if one.report.items_per_second >= enough]
    same = [one for one in good if (one.in_flight, one.window) == current]
    chosen = min(same or good, key=lambda one: (one.in_flight + one.window, one.in_flight))
    rule = "as it is, " if same else "the least N + W "
    reasons = [
        f"lag budget {cfg.updates} updates of {batch} items: N + W <= {cfg.updates * batch}",
        f"{len(tried) - len(kept)} of {len(tried)} pairs are past the skew budget {cfg.skew}",
        f"fastest: {_told(best)}",
        f"picked: {_told(chosen)}, {rule}within {CLOSE:.0%} of the fastest",
    ]
    faster = [one for one in tried if one.report.items_per_second > best.report.items_per_second]
    if faster:
        reasons.append(f"refused for its skew: {_told(max(faster, key=_rate))}")
    if chosen.report.trainer_idle > 0.1:
        reasons.append(
            f"the trainer still waits {chosen.report.trainer_idle:.0%} of the time: "
            "more lag, more instances or a deadline for the longest items would help, W does not"
        )
    return Tuned(
        in_flight=chosen.in_flight,
        window=chosen.window,
        predicted=chosen.report,
        reasons=tuple(reasons),
    )


def redraw(measured: Items, count: int, seed: int) -> Items:
    """`count` items drawn from measured ones, with replacement."""
    if not len(measured):
        raise UserError("nothing has been measured, so there is nothing to tune from")
    picked = np.random.default_rng(seed).integers(0, len(measured), count)
    arrays = ("compute", "tool", "length", "domain")
    return dataclasses.replace(
        measured, **{name: getattr(measured, name)[picked] for name in arrays}
    )


def _rate(one: Tried) -> float:
    return one.report.items_per_second


def _told(one: Tried) -> str:
    return (
        f"N={one.in_flight} W={one.window} ({one.report.items_per_second:.4g} items/s, skew "
        f"{one.skew:.3f}, mean lag {one.report.updates_mean:.1f} updates)"
    )
