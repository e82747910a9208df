"""Routing policies on simulated instances, side by side.

    python -m experiments.bench_router [instances=[4,16,64]] [traces=[agents,groups]]
        [policies=[cost,sticky]] [seeds=[0,1,2]] [weights.work=1.0] [cases.agents.trace.rate=0.1]

Every policy plays the same traces, with the same tiers behind the instances; a row is a policy
on a trace, its numbers the means over the seeds. The run folder holds rows.json and router.png.
docs/rollout.md says what is simulated.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.command import command
from forge_jax.config import UserError, check, load
from forge_jax.rollout.router.baselines import POLICIES
from forge_jax.rollout.router.cost import Weights
from forge_jax.rollout.router.instance import InstanceConfig
from forge_jax.rollout.router.simulate import Served, TierConfig, simulate
from forge_jax.rollout.router.traces import TraceConfig, trace

TIMES = ("ttft_mean", "ttft_p99")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace and the tiers it is played on."""

    trace: TraceConfig = field(default_factory=TraceConfig)
    tiers: TierConfig = field(default_factory=TierConfig)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_router.yaml`."""

    instances: tuple[int, ...]
    policies: tuple[str, ...]
    traces: tuple[str, ...]
    seeds: tuple[int, ...]
    cases: Mapping[str, Any]
    weights: Weights = field(default_factory=Weights)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    out: str | None = None

    def __post_init__(self) -> None:
        for name in ("instances", "policies", "traces", "seeds"):
            check(len(getattr(self, name)) > 0, f"{name}=[] must name at least one")
        for count in self.instances:
            check(count >= 1, f"instances={count} must be at least 1")
        for policy in self.policies:
            known = ", ".join(POLICIES)
            check(policy in POLICIES, f"policies={policy!r} must be among {known}")
        for name in self.traces:
            known = ", ".join(self.cases)
            check(name in self.cases, f"traces={name!r} must be among the cases {known}")

    def case(self, name: str) -> Case:
        """Raises UserError naming a bad key."""
        return load(Case, self.cases[name], f"cases.{name}.")


@command("bench_router")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(load(BenchConfig, mapping), Path(HydraConfig.get().runtime.output_dir))


def run(cfg: BenchConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises UserError for what cannot be simulated."""
    if (folder / "rows.json").exists():
        raise UserError(f"out={folder} holds a benchmark already")
    console = Console(stderr=True)
    cases = {name: cfg.case(name) for name in cfg.traces}
    rows = []
    with Progress(console=console) as bars:
        total = len(cases) * len(cfg.instances) * len(cfg.policies)
        bar = bars.add_task("simulating", total=total)
        for name, case in cases.items():
            for count in cfg.instances:
                for policy in cfg.policies:
                    bars.update(bar, description=f"{name}, {count} instances, {policy}")
                    rows.append(measure(cfg, name, case, count, policy))
                    bars.update(bar, advance=1)
    found = {"rows": rows, "verdicts": verdicts(rows)}
    (folder / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(folder / "router.png", rows)
    console.print(table(rows))
    return found | {"run_dir": str(folder)}


def measure(cfg: BenchConfig, name: str, case: Case, instances: int, policy: str) -> dict[str, Any]:
    """One row: means over the seeds, and what each seed gave of the times."""
    runs = []
    for seed in cfg.seeds:
        sessions = trace(case.trace, instances, seed)
        served = simulate(
            sessions, instances, POLICIES[policy], cfg.weights, cfg.instance, case.tiers, seed
        )
        runs.append(numbers(served, case.tiers.token_bytes))
    row = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    by_seed = {f"{key}_by_seed": [run[key] for run in runs] for key in TIMES}
    return {"policy": policy, "trace": name, "instances": instances} | row | by_seed


def numbers(served: Sequence[Served], token_bytes: int) -> dict[str, float]:
    """Of one simulation."""
    ttft = np.array([call.ttft for call in served])
    tokens = sum(call.tokens for call in served)
    gap = np.abs(ttft - [call.predicted for call in served])
    return {
        "ttft_mean": float(ttft.mean()),
        "ttft_p50": float(np.median(ttft)),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "hit_rate": sum(call.cached for call in served) / tokens,
        "transferred_bytes": float(sum(call.moved for call in served) * token_bytes),
        "prediction_error_p50": float(np.median(gap)),
        "seconds": max(call.ended for call in served),
        "calls": len(served),
        "prompt_tokens": tokens,
    }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How the cost function fares against the best of the other policies, by each time.

    `ratio` is its mean over theirs, `ratio_by_seed` that of each seed.
    """
    found = []
    for trace_name, count in dict.fromkeys((row["trace"], row["instances"]) for row in rows):
        here = [row for row in rows if (row["trace"], row["instances"]) == (trace_name, count)]
        ours = [row for row in here if row["policy"] == "cost"]
        others = [row for row in here if row["policy"] != "cost"]
        for key in TIMES if ours and others else ():
            best = min(others, key=lambda row: row[key])
            pairs = zip(ours[0][f"{key}_by_seed"], best[f"{key}_by_seed"], strict=True)
            found.append(
                {
                    "trace": trace_name,
                    "instances": count,
                    "of": key,
                    "best_other": best["policy"],
                    "ratio": ours[0][key] / best[key],
                    "ratio_by_seed": [mine / theirs for mine, theirs in pairs],
                }
            )
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows for a reader; times with half the distance between the seeds' extremes."""
    made = Table(box=HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("trace", "n", "policy"):
        made.add_column(heading)
    for heading in ("TTFT mean, s", "p99, s", "hits", "moved GB"):
        made.add_column(heading, justify="right")
    for place, row in enumerate(rows):
        following = rows[place + 1] if place + 1 < len(rows) else {}
        last = (row["trace"], row["instances"]) != (
            following.get("trace"), following.get("instances"),
        )  # fmt: skip
        made.add_row(
            row["trace"],
            str(row["instances"]),
            row["policy"],
            *(f"{row[key]:.3f} ± {_spread(row[f'{key}_by_seed']):.3f}" for key in TIMES),
            f"{row['hit_rate']:.1%}",
            f"{row['transferred_bytes'] / 1e9:,.0f}",
            end_section=last,
        )
    return made


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Mean and p99 of every policy over the cost function's, or over the first policy's."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    places = list(dict.fromkeys((row["trace"], row["instances"]) for row in rows))
    found = {(row["policy"], row["trace"], row["instances"]): row for row in rows}
    base = "cost" if "cost" in policies else policies[0]
    figure = Figure(figsize=(1.5 + 0.55 * len(places), 7), layout="constrained")
    for axis, key, words in zip(
        figure.subplots(2, 1, sharex=True), TIMES, ("mean", "p99"), strict=True
    ):
        for policy, marker in zip(policies, "osv^D", strict=False):
            ratios = [found[policy, *at][key] / found[base, *at][key] for at in places]
            axis.plot(range(len(places)), ratios, marker, ms=6, label=policy)
        axis.set(yscale="log", ylabel=f"{words} TTFT over that of {base}")
        axis.grid(alpha=0.25)
    axis.set_xticks(range(len(places)), [f"{name}, {n}" for name, n in places], rotation=60)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8, ncols=len(policies))
    figure.savefig(path, dpi=120)


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


if __name__ == "__main__":
    main()
