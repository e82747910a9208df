"""Plots of a benchmark of merging: speed-up over redundancy, cost over context length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.bench.report import IDEALS

NONE, CHAIN, IDEAL = "#1f6f8b", "#c8553d", "0.35"


def draw_speedup(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Speed-up of the tree over both baselines, against how often a token recurs.

    Beside each measurement stands the ratio of the FLOPs, which is what could be reached.
    """
    rows = sorted(rows, key=lambda row: row["tokens_total"] / row["tokens_unique"])
    redundancy = [row["tokens_total"] / row["tokens_unique"] for row in rows]
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axis = figure.subplots()
    axis.plot(redundancy, redundancy, ":", color=IDEAL, label="redundancy itself: tokens alone")
    for mode, line, colour in (("none", "--", NONE), ("chain", "none", CHAIN)):
        ideal = [row[IDEALS[mode]] for row in rows]
        measured = [row[f"speedup_vs_{mode}"] for row in rows]
        axis.plot(
            redundancy, ideal, linestyle=line, marker="_", ms=14, color=colour,
            label=f"over {mode}, ideal by FLOPs",
        )  # fmt: skip
        axis.plot(redundancy, measured, "o", color=colour, label=f"over {mode}, measured")
    for x, row in zip(redundancy, rows, strict=True):
        axis.annotate(
            row["workload"], (x, x), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set(xscale="log", yscale="log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter("{x:g}")
        side.set_minor_locator(NullLocator())
    axis.set_xlabel("redundancy: tokens of all samples / unique tokens")
    axis.set_ylabel("speed-up of tree, whole updates")
    axis.margins(0.15)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_context(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Microseconds per token of an update over the length of isolated samples.

    The line below is what the FLOPs would take at the machine's rate of multiplication.
    """
    length = [point["context"] for point in points]
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axis = figure.subplots()
    for key, style, colour, label in (
        ("seconds", "o-", NONE, "measured"),
        ("gemm_seconds", "--", IDEAL, "its FLOPs at the rate of a large matrix product"),
    ):
        cost = [1e6 * point[key] / point["tokens"] for point in points]
        axis.plot(length, cost, style, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(length, [f"{n:,}" for n in length])
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"tokens of a sample (about {points[0]['tokens']:,} in every update)")
    axis.set_ylabel("µs per token, whole update")
    axis.set_title("samples that share nothing; second half trained", fontsize=10)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_memory(
    path: Path, found: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, tuple[int, int]]
) -> None:
    """Memory of each process over its time, beside what the long path keeps for all blocks."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axis = figure.subplots()
    for (name, (tokens, budget)), colour in zip(
        jobs.items(), (IDEAL, CHAIN, "#e3a857", NONE), strict=True
    ):
        seconds, sizes = np.array(found[name]["memory"]).T
        cut = "in one piece" if tokens == budget else f"in blocks of {budget:,}"
        axis.plot(
            seconds / seconds[-1], (sizes - sizes[0]) / 2**20, color=colour,
            label=f"{tokens:,} tokens {cut}, {seconds[-1]:.0f} s",
        )  # fmt: skip
    kept = found["long"]["kept_bytes"] / 2**20
    axis.axhline(kept, ls=":", color=NONE, label="keys, values and their gradients kept")
    axis.set(xlabel="share of the process's time", ylabel="memory since its start, MiB")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
