"""A picture of a plan: the memory and the time of each mesh, by what they go to."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.planning.chips import GIB
from experiments.planning.report import BUSY, shape
from experiments.planning.roofline import LIMITS
from experiments.planning.search import Candidate

COLOURS = (
    "#1f6f8b", "#c8553d", "#e3a857", "#6a994e", "#8d6a9f", "#9aa5ab", "#3d405b", "#d9a5b3",
)  # fmt: skip


def draw(
    path: Path, compiled: Sequence[Candidate], guessed: Sequence[Candidate], limit: float
) -> None:
    """Compiled meshes above those that are only estimated, both best first."""
    rows = [*((c, "compiled") for c in compiled), *((c, "estimate") for c in guessed)]
    figure = Figure(figsize=(13, 2.4 + 0.42 * len(rows)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    kinds = list(dict.fromkeys(name for row, _ in rows for name in row.memory))
    _bars(memory, [{k: v / GIB for k, v in row.memory.items()} for row, _ in rows], kinds)
    memory.axvline(limit / GIB, color="black", linestyle="--", label="there is")
    memory.set(xlabel="GiB of a chip")
    busy = [{LIMITS[name]: getattr(row.seconds, name) for name in BUSY} for row, _ in rows]
    _bars(time, busy, [LIMITS[name] for name in BUSY])
    bounds = [row.bound for row, _ in rows]
    time.plot(bounds, range(len(rows)), "k|", markersize=14, label="no less than")
    time.set(xlabel="seconds that each part is busy")
    memory.set_yticks(range(len(rows)), [f"{shape(row.sizes)} ({how})" for row, how in rows])
    memory.invert_yaxis()
    for axis in (memory, time):
        axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3)
        axis.grid(alpha=0.25, axis="x")
    figure.savefig(path, dpi=120)


def _bars(axis: Axes, rows: Sequence[dict[str, float]], kinds: Sequence[str]) -> None:
    left = np.zeros(len(rows))
    for i, kind in enumerate(kinds):
        width = np.array([row.get(kind, 0.0) for row in rows])
        axis.barh(range(len(rows)), width, left=left, label=kind, color=COLOURS[i % len(COLOURS)])
        left += width
