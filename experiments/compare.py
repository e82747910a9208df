"""Compares training runs: curves, final scores, and what it took to come to a target.

    python -m experiments.compare runs=MULTIRUN [by=[sched.policy]] [y=[reward]] [target=0.9]

Prints markdown tables to stderr, draws a plot where one is asked for, and ends with {"groups":
[{"by", "seeds", "last", "scores", "to_target"}...], "plot"}: `last` is the mean of the last rows
of each `y`, every estimate {"mean", "low", "high", "runs"}. docs/results.md tells how to read it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.command import command
from experiments.comparing import (
    AXES,
    Estimate,
    Group,
    band,
    check_told,
    curve,
    estimate,
    grouped,
    read_runs,
    scores,
    to_target,
)
from experiments.simulate import check_plot
from forge_jax.config import check, load


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """One comparison; see `configs/compare.yaml`."""

    runs: tuple[str, ...]
    by: tuple[str, ...] | None
    x: str
    y: tuple[str, ...]
    target: float | None
    smooth: int
    partial: bool
    plot: str | None

    def __post_init__(self) -> None:
        check(len(self.runs) > 0, "runs=[] names no folder")
        check(self.x in AXES, f"x={self.x!r} must be one of {', '.join(AXES)}")
        check(len(self.y) > 0, "y=[] names no number of metrics.jsonl")
        check(self.smooth >= 1, f"smooth={self.smooth} must be at least 1")
        check_plot(self.plot)


@command("compare", plain=())
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    alone = {key: [mapping[key]] for key in ("runs", "by", "y") if isinstance(mapping[key], str)}
    cfg = load(CompareConfig, mapping | alone)
    runs = read_runs(cfg.runs, cfg.partial)
    check_told(runs, cfg.y)
    groups = grouped(runs, cfg.by)
    compared = [row_of(group, cfg) for group in groups]
    print(tables(compared, cfg), file=sys.stderr)
    if cfg.plot is not None:
        figure_of(groups, cfg).savefig(cfg.plot, dpi=110)
    return {"groups": compared, "plot": cfg.plot}


def row_of(group: Group, cfg: CompareConfig) -> dict[str, Any]:
    """What is told of a group, as plain JSON."""
    ends = {y: [curve(run, cfg.x, y, cfg.smooth)[1][-1:] for run in group.runs] for y in cfg.y}
    last = {y: estimate([float(end[0]) for end in ends[y] if len(end)]) for y in cfg.y}
    target = None
    if cfg.target is not None:
        target = to_target(group, cfg.y, cfg.smooth, cfg.target)
    told = {"last": last, "scores": scores(group), "to_target": target}
    return {
        "by": dict(group.by),
        "name": group.name,
        "seeds": [run.settings["seed"] for run in group.runs],
        "ended": sum(run.summary is not None for run in group.runs),
    } | {key: plain(value) for key, value in told.items()}


def plain(value: Any) -> Any:
    """Estimates inside of mappings as mappings."""
    if isinstance(value, Estimate):
        return asdict(value)
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def tables(rows: Sequence[Mapping[str, Any]], cfg: CompareConfig) -> str:
    """Markdown: what was last and final, and then what it took to come to the target."""
    names = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    heads = [*(f"last {y}" for y in cfg.y), *names]
    body = [
        [f"{row['name']} ({len(row['seeds'])})"]
        + [cell(row["last"][y]) for y in cfg.y]
        + [cell(row["scores"].get(name)) for name in names]
        for row in rows
    ]
    lines = markdown(["runs", *heads], body)
    if cfg.target is not None:
        wanted = list(cfg.y) if len(cfg.y) == 1 else [*cfg.y, "all"]
        heads = [f"{name}: {x}" for name in wanted for x in ("reached", *AXES)]
        body = [[row["name"], *told(row["to_target"], wanted)] for row in rows]
        lines += ["", f"To a mean of {cfg.smooth} rows >= {cfg.target}:", ""]
        lines += markdown(["runs", *heads], body)
    return "\n".join(lines)


def told(target: Mapping[str, Mapping[str, Any]], wanted: Sequence[str]) -> list[str]:
    """Cells of the second table; means are of the runs that came to the target alone."""
    cells = []
    for name in wanted:
        row = target[name]
        cells += [f"{row['reached']} of {row['of']}", *(cell(row[x]) for x in AXES)]
    return cells


def cell(found: Mapping[str, Any] | None) -> str:
    """An estimate: its mean and its interval."""
    if found is None:
        return "–"
    mean, low, high = (number(found[key]) for key in ("mean", "low", "high"))
    return mean if found["runs"] == 1 else f"{mean} [{low}, {high}]"


def number(value: float) -> str:
    """A number in as many digits as are of use."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in body]


def figure_of(groups: Sequence[Group], cfg: CompareConfig) -> Figure:
    """A panel for each `y`: means over seeds with their intervals."""
    figure = Figure(figsize=(5.5 * len(cfg.y), 4.2), layout="constrained")
    for axes, y in zip(figure.subplots(1, len(cfg.y), squeeze=False)[0], cfg.y, strict=True):
        for group in groups:
            at, middle, low, high = band(group, cfg.x, y, cfg.smooth)
            axes.plot(at, middle, linewidth=1.5, label=group.name)
            axes.fill_between(at, low, high, alpha=0.18)
        if cfg.target is not None:
            axes.axhline(cfg.target, linestyle=":", color="0.4")
        axes.set(title=y, xlabel=cfg.x)
        axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    # About 11 characters an inch, and as much as eight for a line's sample.
    fitting = max(1, 60 * len(cfg.y) // (max(map(len, labels), default=0) + 8))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(fitting, len(labels)))
    return figure


if __name__ == "__main__":
    main()
