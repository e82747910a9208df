"""Shows the rows of an evaluation, one a task family: as a table, and as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.compare import markdown

Row = Mapping[str, Any]
# Titles and keys of the panels beside that of success.
PANELS = {
    "calls": "mean_turns",
    "sampled tokens": "tokens_sampled_mean",
    "prompt tokens": "tokens_prompt_mean",
    "seconds": "seconds_mean",
}


def table(rows: Sequence[Row]) -> str:
    """Markdown: means with their intervals, and how many episodes did not complete."""
    most = str(rows[0]["samples"])
    unqueued = "seconds_completion_mean"
    heads = ["task", "episodes", "success", *PANELS, "seconds without queue", "not completed"]
    body = []
    for row in rows:
        costs = [interval(row[key], row[f"{key}_ci"]) for key in PANELS.values()]
        cells = [row["task"], str(row["episodes"]), interval(row["success"], row["success_ci"])]
        cells += [*costs, interval(row.get(unqueued), row.get(f"{unqueued}_ci"))]
        cells.append(str(row["episodes"] - row["ended"].get("completed", 0)))
        if most != "1":
            best = interval(row["pass_at"].get(most), row["pass_at_ci"].get(most))
            cells.insert(3, best)
        body.append(cells)
    if most != "1":
        heads.insert(3, f"pass@{most}")
    return "\n".join(markdown(heads, body))


def interval(mean: float | None, ends: tuple[float, float] | None) -> str:
    """A mean and its interval in three digits; a dash where it was not measured."""
    if mean is None or ends is None:
        return "–"
    return f"{mean:.3g} [{ends[0]:.3g}, {ends[1]:.3g}]"


def draw(path: str, rows: Sequence[Row]) -> None:
    """Success, and pass@k where there are samples, over task families; beside it what it cost."""
    figure = Figure(figsize=(4.2 + 2.8 * len(PANELS), 3.8), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(PANELS), width_ratios=[1.6] + [1] * len(PANELS))
    names = [row["task"] for row in rows]
    for k in rows[0]["pass_at"]:
        told = [row for row in rows if k in row["pass_at"]]
        means = [row["pass_at"][k] for row in told]
        ends = [row["pass_at_ci"][k] for row in told]
        bars(first, [row["task"] for row in told], means, ends, f"pass@{k}")
    first.set(title="success", ylim=(0, 1.05))
    if len(rows[0]["pass_at"]) > 1:
        first.legend(fontsize=8)
    for axes, (title, key) in zip(others, PANELS.items(), strict=True):
        bars(axes, names, [row[key] for row in rows], [row[f"{key}_ci"] for row in rows], title)
        axes.set(title=title)
        axes.set_ylim(bottom=0)
    for axes in (first, *others):
        axes.grid(axis="y", alpha=0.25)
        axes.tick_params(axis="x", rotation=45)
    figure.savefig(path, dpi=110)


def bars(
    axes: Any,
    names: Sequence[str],
    means: Sequence[float],
    ends: Sequence[tuple[float, float]],
    label: str,
) -> None:
    """Points with intervals above names."""
    low = [max(0.0, mean - end[0]) for mean, end in zip(means, ends, strict=True)]
    high = [max(0.0, end[1] - mean) for mean, end in zip(means, ends, strict=True)]
    axes.errorbar(names, means, yerr=[low, high], fmt="o", capsize=4, label=label)
