"""Scheduling policies side by side: what each costs in throughput, lag and skew.

    python -m experiments.bench_window [workloads=[lognormal]] [supplies=[1]] [plot=FILE.png]

Prints a table and {"rows": [{"workload", "supply", "policy", "in_flight", "window", "relative",
"cpu_seconds", ...}...], "reasons": {...}}; `relative` is items a second over greedy's where that is
among the policies, the rest is `forge_jax.sched.skew.Report`. docs/scheduling.md reads it.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.command import command
from experiments.simulate import check_plot
from forge_jax.config import UserError, check, load
from forge_jax.sched.fleet import play
from forge_jax.sched.instances import FleetConfig
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.latency import (
    Bimodal,
    Domain,
    Items,
    Light,
    LogNormal,
    Pareto,
    mixture,
    recorded,
)
from forge_jax.sched.online import OnlineConfig, Tuner
from forge_jax.sched.played import Played, TrainerConfig
from forge_jax.sched.policies import (
    GreedyDrop,
    Policy,
    VersionWindow,
    Window,
    fifo,
    greedy,
    share_window,
)
from forge_jax.sched.pool import Pool
from forge_jax.sched.queue import Deadline
from forge_jax.sched.skew import over_time, report
from forge_jax.sched.tuner import TuneConfig, redraw, tune

WORKLOADS = {  # of mean 1 s in service
    "light": (Domain(name="light", share=1.0, compute=Light()),),
    "lognormal": (Domain(name="lognormal", share=1.0, compute=LogNormal()),),
    "pareto": (Domain(name="pareto", share=1.0, compute=Pareto()),),
    "bimodal": (
        Domain(name="bimodal", share=1.0, compute=Light(mean=0.3), tool=Bimodal(mean=0.7)),
    ),
    "mixed": (
        Domain(name="fast", share=0.5, compute=LogNormal(mean=0.2, sigma=0.5)),
        Domain(name="slow", share=0.5, compute=LogNormal(mean=1.8, sigma=0.5)),
    ),
}
SHARES = {"tenth": 0.1, "third": 0.3, "full": 1.0}  # W over N
POLICIES = ("fifo", *SHARES, "deadline", "greedy", "drop", "versions", "tuned", "online")
STRETCHES = 25  # of a run, drawn over time


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One comparison; see `configs/bench_window.yaml`."""

    workloads: tuple[str, ...]
    pool: str | None
    supplies: tuple[float, ...]
    policies: tuple[str, ...]
    in_flight: int
    batch: int
    updates: int
    lag_updates: int | None
    deadline: float
    skew: float
    horizon: int
    every: int
    instances: int
    slowdown: float
    failure_seconds: float | None
    repair_seconds: float
    item_failures: float
    seed: int
    plot: str | None

    def __post_init__(self) -> None:
        for name, known in (("workloads", tuple(WORKLOADS)), ("policies", POLICIES)):
            for value in getattr(self, name):
                check(value in known, f"{name}={value} must be one of {', '.join(known)}")
        check(bool(self.workloads or self.pool), "workloads=[] needs a pool")
        check(bool(self.policies), "policies=[] must name at least one")
        for supply in self.supplies:
            check(0 < supply < math.inf, f"supplies={supply} must be a number > 0")
        check(0 < self.deadline < math.inf, f"deadline={self.deadline} must be a number > 0")
        check(self.updates >= 10, f"updates={self.updates} must be at least 10")

    @property
    def fleet(self) -> FleetConfig:
        return FleetConfig(
            instances=self.instances,
            slowdown=self.slowdown,
            failure_seconds=math.inf if self.failure_seconds is None else self.failure_seconds,
            repair_seconds=self.repair_seconds,
            item_failures=self.item_failures,
        )

    @property
    def tune(self) -> TuneConfig:
        return TuneConfig(updates=self.budget, skew=self.skew, horizon=self.horizon, seed=self.seed)

    @property
    def budget(self) -> int:
        """The lag budget in updates."""
        if self.lag_updates is not None:
            return self.lag_updates
        items = self.in_flight + share_window(self.in_flight, SHARES["third"]) - 1
        return items // self.batch + 1


@command("bench_window", plain=("pool",))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return bench(load(BenchConfig, mapping))


def bench(cfg: BenchConfig) -> dict[str, Any]:
    """The command's result. Raises UserError naming a bad key."""
    plot = check_plot(cfg.plot)
    rows, reasons, lines = [], {}, {}
    for name, items in workloads(cfg).items():
        for supply in cfg.supplies:
            train = supply * cfg.batch * float(items.duration.mean()) / cfg.in_flight
            found = []
            for kind in cfg.policies:
                policy, why = pick_policy(cfg, kind, items, train)
                limit = cfg.deadline * float(items.duration.mean())
                deadline = Deadline(seconds=limit) if kind == "deadline" else None
                tuner = new_tuner(cfg) if kind == "online" else None
                row, played = measure(cfg, items, policy, train, deadline, tuner)
                if tuner is not None:
                    why = [f"{one.updates}: {', '.join(one.reasons)}" for one in tuner.log]
                if why:
                    reasons[f"{name}, supply {supply:g}, {kind}"] = why
                found.append({"workload": name, "supply": supply, "policy": kind} | row)
                lines[name, supply, kind] = over_time(items, played, STRETCHES)
                print(f"{name} at supply {supply:g}: {kind}", file=sys.stderr, flush=True)
            rows += relative(found)
    print(table(rows), file=sys.stderr)
    if plot is not None:
        draw(plot, cfg, rows, lines)
    return {"rows": rows, "reasons": reasons}


def workloads(cfg: BenchConfig) -> dict[str, Items]:
    """By name, enough items for all places and updates."""
    count = cfg.in_flight + cfg.updates * cfg.batch
    found = {name: mixture(WORKLOADS[name], count, cfg.seed) for name in cfg.workloads}
    if cfg.pool is not None:
        pool = Pool.open(cfg.pool)
        found["pool"] = redraw(recorded(pool.get(item) for item in pool.items()), count, cfg.seed)
    return found


def pick_policy(
    cfg: BenchConfig, kind: str, items: Items, train: float
) -> tuple[Policy, list[str]]:
    """A policy by its name, and the tuner's reasons where it is the tuner's."""
    n = cfg.in_flight
    if kind in SHARES:
        return Window(in_flight=n, window=share_window(n, SHARES[kind])), []
    if kind == "fifo":
        return fifo(n), []
    if kind in ("deadline", "online"):
        return Window(in_flight=n, window=share_window(n, SHARES["third"])), []
    if kind == "greedy":
        return greedy(n), []
    if kind == "drop":
        return GreedyDrop(in_flight=n, max_updates=cfg.budget), []
    if kind == "versions":
        versions = (cfg.budget * cfg.batch - n) // cfg.batch - 1
        if versions < 0:
            raise UserError(f"lag_updates={cfg.budget} is too few for in_flight={n} and versions")
        return VersionWindow(in_flight=n, versions=versions), []
    tuned = tune(items, batch=cfg.batch, train_seconds=train, cfg=cfg.tune, fleet=cfg.fleet)
    return Window(in_flight=tuned.in_flight, window=tuned.window), list(tuned.reasons)


def new_tuner(cfg: BenchConfig) -> Tuner:
    """One that starts from nothing measured."""
    online = OnlineConfig(tune=cfg.tune, every=cfg.every)
    return Tuner(online, batch=cfg.batch, fleet=cfg.fleet)


def measure(
    cfg: BenchConfig,
    items: Items,
    policy: Policy,
    train: float,
    deadline: Deadline | None,
    tuner: Tuner | None,
) -> tuple[dict[str, Any], Played]:
    """One policy on one workload: its numbers, and all that happened."""
    began = time.process_time()
    lanes = Lanes([LaneConfig(name="all", policy=policy, deadline=deadline)], batch=cfg.batch)
    trainer = TrainerConfig(seconds=train, updates=cfg.updates)
    own = (tuple(range(len(items.names))),)
    played = play(items, lanes, own, cfg.fleet, trainer, seed=cfg.seed, tuner=tuner)
    seconds = time.process_time() - began
    last = lanes.queues[0].policy
    window = last.window if isinstance(last, Window) else None
    row = {"in_flight": last.places, "window": window, "cpu_seconds": seconds}
    return row | dataclasses.asdict(report(items, played)), played


def relative(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With items a second over greedy's; None without greedy."""
    greedy_rate = [row["items_per_second"] for row in rows if row["policy"] == "greedy"]
    return [
        row | {"relative": row["items_per_second"] / greedy_rate[0] if greedy_rate else None}
        for row in rows
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a table for each supply: items a second over greedy's, the largest lag in updates,
    the skew in waves, the lasting skew, and what was given up where anything was."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    lines = []
    for supply in dict.fromkeys(row["supply"] for row in rows):
        lines += ["", f"| supply {supply:g} | " + " | ".join(names) + " |"]
        lines.append("|" + "---|" * (1 + len(names)))
        mine = [row for row in rows if row["supply"] == supply]
        for kind in dict.fromkeys(row["policy"] for row in mine):
            cells = [_cell(row) for row in mine if row["policy"] == kind]
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    rate = row["items_per_second"] if row["relative"] is None else row["relative"]
    lost = f", {row['given_up']:.1%} lost" if row["given_up"] else ""
    skews = f"{row['skew_waves']:.2f}, {row['skew_duration']:+.2f}"
    return f"**{rate:.2f}**, {row['updates_max']}, {skews}{lost}"


def draw(
    path: Path,
    cfg: BenchConfig,
    rows: Sequence[Mapping[str, Any]],
    lines: Mapping[tuple[str, float, str], Mapping[str, Any]],
) -> None:
    """Throughput, lag and skew of each policy, a row of panels for each supply."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(18, 3.6 * len(cfg.supplies)), layout="constrained")
    panels = figure.subplots(len(cfg.supplies), 4, squeeze=False)
    columns = (
        ("items_per_second", "items a second", "linear"),
        ("updates_max", "largest lag, updates", "log"),
        ("skew_waves", "skew in waves (rms)", "linear"),
    )
    width = 0.85 / len(cfg.policies)
    shown = "lognormal" if "lognormal" in names else names[0]
    for supply, axes in zip(cfg.supplies, panels, strict=True):
        for axis, (key, title, scale) in zip(axes[:-1], columns, strict=True):
            for i, kind in enumerate(cfg.policies):
                mine = [r for r in rows if (r["supply"], r["policy"]) == (supply, kind)]
                at = [names.index(r["workload"]) + (i + 0.5) * width - 0.425 for r in mine]
                axis.bar(at, [r[key] for r in mine], width, label=kind)
            axis.set_xticks(range(len(names)), names)
            axis.set(title=f"{title}, supply {supply:g}", yscale=scale)
        for kind in cfg.policies:
            line = lines[shown, supply, kind]
            axes[-1].plot(line["duration"], linewidth=1.2, label=kind)
        axes[-1].set(title=f"skew of {shown}, supply {supply:g}", xlabel="stretch of the run")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
