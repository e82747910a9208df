"""Pictures of a run: its curves, and a prefix forest as the trainer saw it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from forge_jax.rl.forest_plot import trained
from forge_jax.types import PackedTree

# One panel each: title, rows of metrics.jsonl drawn in it.
PANELS = (
    ("reward", ("reward", "eval")),
    ("calls per episode", ("mean_turns",)),
    ("lag in items", ("lag_mean", "lag_max")),
    ("importance ratio", ("ratio_mean", "ratio_max")),
    ("entropy", ("entropy",)),
    ("tokens: total over unique", ("tree_token_ratio",)),
)
# Panels of runs that have any of it.
OTHERS = (
    ("effective sample size", ("ess_token", "ess_mean", "ess_sample")),
    ("quantiles of the ratio", ("ratio_p1", "ratio_p10", "ratio_p50", "ratio_p90", "ratio_p99")),
    ("age of tokens in updates", ("age_mean", "age_max")),
    ("cosine of gradients", ("grad_cosine",)),
    ("divergence from the reference", ("kl_reference",)),
    (
        "acceptance of drafts",
        ("acceptance_1", "acceptance_2", "mtp_accepted_1", "mtp_accepted_2"),
    ),
    ("tokens per verify, speed-up", ("tokens_per_verify", "speculation_speedup")),
)
TRAINED, CONTEXT = "#f4a259", "#d7dee8"


def draw_curves(path: Path, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Draws the metrics of a run over its steps; `summary` adds the evaluations."""
    told = {name for row in rows for name, value in row.items() if value is not None}
    others = [*domain_panels(told), *OTHERS]
    panels = [*PANELS, *(panel for panel in others if told.intersection(panel[1]))]
    columns = -(-len(panels) // 2)
    figure = Figure(figsize=(11 * columns / 3, 6), layout="constrained")
    axes = figure.subplots(2, columns).flat
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, names) in zip(axes, panels, strict=False):
        for name in names:
            points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1.4)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        if title == "reward":
            for name, style in (("eval_before", ":"), ("eval_after", "--")):
                if summary.get(name) is not None:
                    axis.axhline(summary[name], linestyle=style, color="0.4", label=name)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=120)


def domain_panels(told: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
    """A panel for each of what is told of domains; none of a run of one task."""
    prefix = "share_items_"
    domains = sorted(name.removeprefix(prefix) for name in told if name.startswith(prefix))
    measures = (
        ("reward of domains", "reward"),
        ("held-out success of domains", "eval"),
        ("lag of domains, in items of their own", "lag_mean"),
        ("share of items", "share_items"),
        ("share of sampled tokens", "share_tokens"),
    )
    return [(title, tuple(f"{measure}_{name}" for name in domains)) for title, measure in measures]


def draw_forest(path: Path, tree: PackedTree, show: Callable[[int], str], leaves: int = 40) -> None:
    """Draws the first `leaves` paths of a forest, one cell a token, one row a leaf.

    A shared token is one tall cell beside all rows that share it; `show` gives the
    text of a token id.
    """
    top, bottom = leaf_rows(tree)
    shown = np.flatnonzero(top < leaves)
    deepest = int(tree.depth[shown].max()) + 1
    rows = int(min(bottom[shown].max(), leaves))
    marked = trained(tree)
    figure = Figure(figsize=(max(4.0, 0.24 * deepest), max(2.0, 0.2 * rows)), layout="constrained")
    axis = figure.subplots()
    for i in shown:
        height = min(bottom[i], leaves) - top[i]
        axis.add_patch(cell(float(tree.depth[i]), float(top[i]), float(height), bool(marked[i])))
        label = printable(show(int(tree.tokens[i])))
        middle = top[i] + height / 2
        axis.text(tree.depth[i] + 0.5, middle, label, ha="center", va="center", fontsize=7)
    axis.set_xlim(0, deepest)
    axis.set_ylim(rows, 0)
    axis.set_yticks([])
    axis.set_xlabel("position")
    axis.set_title(f"prefix forest: {tree.n_tokens} unique tokens; trained ones in orange")
    figure.savefig(path, dpi=120)


def cell(left: float, top: float, height: float, trained: bool) -> Any:
    """The rectangle of one token."""
    return Rectangle(
        (left, top + 0.06),
        0.96,
        height - 0.12,
        facecolor=TRAINED if trained else CONTEXT,
        edgecolor="white",
        linewidth=0.5,
    )


def printable(text: str) -> str:
    """`text` in glyphs that every font has; `$` would begin mathematics."""
    text = text.replace("\n", "⏎").replace("$", r"\$")
    return "".join(c if c == "⏎" or " " <= c <= "~" else "·" for c in text)


def leaf_rows(tree: PackedTree) -> tuple[np.ndarray, np.ndarray]:
    """For every real token the first row it stands beside and the row past its last, i64[N].

    Rows number the leaves in depth-first order.
    """
    n = tree.n_tokens
    exit_ = tree.exit[:n].astype(np.int64)
    is_leaf = exit_ == np.arange(n) + 1
    before = np.concatenate([[0], np.cumsum(is_leaf)])
    return before[:n], before[exit_]
