"""A generation queue and its trainer on a latency trace: the order, and what it costs.

    python -m experiments.simulate trace=FILE.json policy=window [window=W] [in_flight=N]
        [lag_updates=U] [batch=P] [train_seconds=X] [plot=FILE.png]

Prints one JSON object; docs/scheduling.md tells how to read it.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.command import command
from forge_jax.config import UserError, load
from forge_jax.sched.policies import budget_window, share_window
from forge_jax.sched.simulate import Schedule, Trace, simulate

POLICIES = ("window", "fifo", "greedy")
WINDOW_SHARE = 0.3  # of N: what the authors of the method report for their own runs
SLICES = 200  # of the order of consumption, one mean drawn for each


@command("simulate")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(mapping)


def run(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """What configs/simulate.yaml says, simulated. Raises UserError naming a bad key."""
    plot = check_plot(mapping["plot"])
    trace = read_trace(mapping)
    window = pick_window(mapping, trace)
    schedule = simulate(trace, window, _progress(len(trace.service), trace.batch))
    if plot is not None:
        draw(plot, trace, schedule)
    return {
        "order": schedule.order,
        "batches": schedule.batches,
        "lag_max": max(schedule.lags),
        "lag_mean": sum(schedule.lags) / len(schedule.lags),
        "lag_bound": schedule.lag_bound,
        "trainer_idle": schedule.trainer_idle,
        "generator_idle": schedule.generator_idle,
        "makespan": schedule.makespan,
        "skew": schedule.skew,
        "window": window,
    }


def read_trace(mapping: Mapping[str, Any]) -> Trace:
    """The trace file, its sizes overridden by the keys of `mapping` that are not null.

    Raises UserError naming the file, or the key and value in it.
    """
    path = mapping["trace"]
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError) as error:
        raise UserError(f"trace={path!r} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"trace={path!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"trace={path!r} holds a {type(values).__name__}, not an object")
    sizes = {key: mapping[key] for key in ("in_flight", "batch", "train_seconds")}
    overrides = {key: value for key, value in sizes.items() if value is not None}
    try:
        return load(Trace, values | overrides)
    except OverflowError as error:
        raise UserError(f"trace={path!r} holds a number past the largest float") from error


def pick_window(mapping: Mapping[str, Any], trace: Trace) -> int | None:
    """W of a policy: 0 for fifo, None for greedy. Raises UserError naming a bad key."""
    policy, window, updates = mapping["policy"], mapping["window"], mapping["lag_updates"]
    if policy not in POLICIES:
        raise UserError(f"policy={policy!r} must be one of {', '.join(POLICIES)}")
    number = type(window) is int and window >= 0
    share = type(window) is float and 0 <= window <= 1
    if not (number or share or window is None or window == "auto"):
        raise UserError(
            f"window={window!r} must be an integer >= 0, a share of in_flight from 0.0 to 1.0, "
            "auto or null"
        )
    if updates is not None and (type(updates) is not int or updates < 1):
        raise UserError(f"lag_updates={updates!r} must be an integer >= 1, or null")
    if updates is not None and (policy != "window" or window != "auto"):
        raise UserError(f"lag_updates={updates} goes with policy=window window=auto only")
    if policy == "window":
        if updates is not None:
            return budget_window(trace.in_flight, trace.batch, updates)
        if window == "auto" or share:
            return share_window(trace.in_flight, window if share else WINDOW_SHARE)
        return window
    if window != "auto":
        print(f"policy={policy} has its own window; {window=} is not used", file=sys.stderr)
    return 0 if policy == "fifo" else None


def check_plot(plot: Any) -> Path | None:
    """Where to draw, if anywhere; found out before the work. Raises UserError."""
    if plot is None:
        return None
    path = Path(str(plot))
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError(f"plot={plot!r} must be a .png file in a folder that exists")
    return path


def draw(path: Path, trace: Trace, schedule: Schedule) -> None:
    """Draws service seconds over the order of consumption, and the lags."""
    service = np.asarray(trace.service)[schedule.order]
    slices = np.array_split(service, min(SLICES, len(service)))
    ends = np.cumsum([len(s) for s in slices])
    figure = Figure(figsize=(11, 4), layout="constrained")
    duration, lag = figure.subplots(1, 2)
    duration.plot(ends, [s.mean() for s in slices], linewidth=1.2, label="as consumed")
    duration.axhline(service.mean(), color="black", linestyle="--", label="all items")
    duration.set(xlabel="items consumed", ylabel="mean service, seconds")
    duration.set_title(f"skew {schedule.skew:+.3f}, trainer idle {schedule.trainer_idle:.1%}")
    lag.hist(schedule.lags, bins=min(100, max(schedule.lags) + 1))
    if schedule.lag_bound is not None:
        lag.axvline(schedule.lag_bound, color="black", linestyle="--", label="bound")
    lag.set(xlabel="lag, items", ylabel="items")
    lag.set_title(f"lag: mean {np.mean(schedule.lags):.1f}, largest {max(schedule.lags)}")
    for axis in (duration, lag):
        axis.legend(*axis.get_legend_handles_labels())
    figure.savefig(path, dpi=120)


def _progress(total: int, batch: int) -> Callable[[int], None]:
    every = max(total // 10, batch)

    def tell(consumed: int) -> None:
        if consumed % every < batch or consumed == total:
            print(f"consumed {consumed} of {total}", file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    main()
