"""Training runs side by side: folders of runs go in, groups with means and intervals come out.

Runs are grouped by keys of their configurations and may differ beside these only in their seeds.
Means are over the runs of a group, with 95 % bootstrap intervals. Nothing here trains or writes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import leaves, run_config, summary_of
from forge_jax.config import UserError
from forge_jax.rl.evaluate import bootstrap
from forge_jax.rl.report import METRICS, read_rows

AXES = ("steps", "seconds", "tokens")
# Settings that do not make a run another one.
ASIDE = ("seed", "resume", "pool", "log.", "checkpoint_every", "checkpoints_kept")
ROUNDING = 1e-9  # of a mean that is a target exactly
TOTALS = ("seconds", "tokens_sampled", "lag_mean", "lag_max")  # of a summary, beside evaluations


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run has left behind."""

    folder: Path
    settings: Mapping[str, Any]  # by dotted key
    rows: tuple[Mapping[str, Any], ...]  # of metrics.jsonl
    summary: Mapping[str, Any] | None  # by dotted key; None of a run that has not ended


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seeds."""

    by: Mapping[str, Any]  # what they share and other groups do not
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.by.items()) or "all"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over runs."""

    mean: float
    low: float  # 95 % bootstrap interval of the mean
    high: float
    runs: int  # that have the value


def read_run(folder: Path) -> Run:
    """Raises UserError where the folder's files are not those of a run."""
    summary = summary_of(folder)
    return Run(
        folder=folder,
        settings=dict(leaves(asdict(run_config(folder)))),
        rows=tuple(read_rows(folder / METRICS)),
        summary=None if summary is None else dict(leaves(summary)),
    )


def read_runs(places: Sequence[str], partial: bool) -> list[Run]:
    """The runs in `places`, each the folder of a run or of a multirun, in the order of their names.

    Raises UserError where a place has no run and, unless `partial`, naming those not ended.
    """
    runs: list[Run] = []
    for place in map(Path, places):
        folders = [place, *sorted(place.glob("[!.]*"))] if place.is_dir() else []
        found = [read_run(folder) for folder in folders if (folder / "config.yaml").is_file()]
        if not found:
            raise UserError(f"runs={place}: no run there")
        runs += found
    unended = [str(run.folder) for run in runs if run.summary is None]
    if unended and not partial:
        raise UserError(
            f"not ended: {', '.join(unended)}; the same call of experiments.train "
            "goes on with them; experiments.compare with partial=true shows what there is"
        )
    return [run for run in runs if run.rows or run.summary is not None]


def grouped(runs: Sequence[Run], by: Sequence[str] | None) -> list[Group]:
    """Runs by their values of `by`, or of all that they differ in.

    Raises UserError on a key that no run has, and on runs of a group that differ in more.
    """
    differing = [key for key in _keys(runs) if len(_values(runs, key)) > 1]
    keys = differing if by is None else by
    for key in keys:
        if not any(key in run.settings for run in runs):
            raise UserError(f"by={key}: no run has such a setting")
    together: dict[str, list[Run]] = {}
    for run in runs:
        told = {key: run.settings.get(key) for key in keys}
        together.setdefault(json.dumps(told), []).append(run)
    groups = [Group(by=json.loads(told), runs=tuple(own)) for told, own in together.items()]
    for group in groups:
        more = [key for key in _keys(group.runs) if len(_values(group.runs, key)) > 1]
        if more:
            raise UserError(
                f"by={list(keys)}: runs of {group.name} differ in {', '.join(more)}, too"
            )
    return groups


def check_told(runs: Sequence[Run], ys: Sequence[str]) -> None:
    """Raises UserError where no row of any run has a number called as one of `ys`."""
    for y in ys:
        if not any(_is_number(row.get(y)) for run in runs for row in run.rows):
            raise UserError(f"y={y}: no {METRICS} has such a number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _keys(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if not key.startswith(ASIDE)]


def _values(runs: Sequence[Run], key: str) -> set[str]:
    return {repr(run.settings.get(key)) for run in runs}


def axis(run: Run, x: str) -> np.ndarray:
    """How far the run was after each of its rows, f64[rows]: updates, seconds of RL, or tokens
    sampled by what was consumed."""
    if x == "steps":
        return np.array([row["step"] for row in run.rows], np.float64)
    keys = ("tokens_sampled",) if x == "tokens" else ("seconds_collect", "seconds_update")
    return np.cumsum([sum(row[key] for key in keys) for row in run.rows]).astype(np.float64)


def curve(run: Run, x: str, y: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    """Where `y` was told, f64[n], and its means over `smooth` such rows, the last there, f64[n]."""
    told = [i for i, row in enumerate(run.rows) if _is_number(row.get(y))]
    values = [float(run.rows[i][y]) for i in told]
    means = [np.mean(values[max(end - smooth, 0) : end]) for end in range(1, len(values) + 1)]
    return axis(run, x)[told], np.array(means, np.float64)


def reached(run: Run, x: str, y: str, smooth: int, target: float) -> float | None:
    """How far the run was when the mean of `smooth` rows first came to `target`; None: never."""
    at, values = curve(run, x, y, smooth)
    whole = np.flatnonzero((values >= target - ROUNDING) & (np.arange(len(values)) >= smooth - 1))
    return float(at[whole[0]]) if len(whole) else None


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a run; None of none."""
    if not values:
        return None
    low, high = bootstrap(np.array(values, np.float64))
    return Estimate(mean=float(np.mean(values)), low=low, high=high, runs=len(values))


def band(
    group: Group, x: str, y: str, smooth: int, points: int = 60
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A group's curve: places, means, low and high ends of the intervals, f64[points] each; as far
    as its shortest run goes."""
    curves = [c for c in (curve(run, x, y, smooth) for run in group.runs) if len(c[0])]
    if not curves:
        return (np.zeros(0),) * 4
    grid = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), points)
    drawn = np.array([np.interp(grid, *c) for c in curves])
    low, high = np.array([bootstrap(column) for column in drawn.T]).T
    return grid, drawn.mean(axis=0), low, high


def scores(group: Group) -> dict[str, Estimate]:
    """Final numbers of a group's ended runs: evaluations, each domain's too, and a few totals."""
    ended = [run.summary for run in group.runs if run.summary is not None]
    names = dict.fromkeys(
        key
        for summary in ended
        for key, value in summary.items()
        if _is_number(value) and (key.startswith("eval_") or key in TOTALS)
    )
    found = {name: estimate([s[name] for s in ended if _is_number(s.get(name))]) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def to_target(
    group: Group, ys: Sequence[str], smooth: int, target: float
) -> dict[str, dict[str, Any]]:
    """For each of `ys`, and for all of them together, how many runs came to the target, and after
    how much of each axis, the mean of those that did."""
    told: dict[str, dict[str, Any]] = {}
    for name, wanted in {**{y: [y] for y in ys}, "all": list(ys)}.items():
        row: dict[str, Any] = {"of": len(group.runs)}
        for x in AXES:
            found = [[reached(run, x, y, smooth, target) for y in wanted] for run in group.runs]
            ends = [max(one) for one in found if None not in one]  # type: ignore[type-var]
            row |= {"reached": len(ends), x: estimate(ends)}  # type: ignore[arg-type]
        told[name] = row
    return told
