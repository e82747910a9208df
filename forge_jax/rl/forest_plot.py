"""Pictures of a prefix forest: who shares what, and what attention visits for it.

A merged forest and the side of a tile go in; matplotlib axes are drawn on. Both axes of the
forest's picture are its own: a token stands at (its place in depth-first order, its depth), and
the column below the top of the picture at that place is its whole context.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from forge_jax.attention.plan import TilePlan, tree_plan
from forge_jax.attention.tiles import Tiles, unpack
from forge_jax.types import PackedTree

NEAR = 1024  # tokens of which the mask is drawn one by one
TICKS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]  # of samples
TRAINED = "#e07a1f"
DEAD, MASKED, FULL = range(3)
TILE_COLOURS = ("#ffffff", "#f2b56b", "#1f6f8b")
UNSEEN, VISITED, SEEN = range(3)
PAIR_COLOURS = ("#ffffff", "#f8dcb8", "#1f6f8b")


def draw_forest_and_tiles(path: Path, tree: PackedTree, tile: int, name: str) -> None:
    """A forest, the tiles its attention visits, and the mask around its first leaf, as a PNG."""
    figure = Figure(figsize=(11, 10.5), layout="constrained")
    axes = figure.subplot_mosaic([["forest", "forest"], ["tiles", "mask"]], height_ratios=[4, 5])
    draw_icicle(axes["forest"], tree)
    axes["forest"].set_title(f"{name}: {axes['forest'].get_title()}", fontsize=10)
    plan = tree_plan(tree.exit[: tree.n_tokens], tile=tile, layout="tiles", bucket=lambda n: n)
    draw_tiles(axes["tiles"], plan)
    first_leaf = int(np.argmax(tree.exit[: tree.n_tokens] == np.arange(tree.n_tokens) + 1))
    size = min(tree.n_tokens, NEAR)
    start = min(max(0, first_leaf - size // 2), tree.n_tokens - size)
    draw_mask(axes["mask"], plan, start, size)
    figure.savefig(path, dpi=110)


def draw_icicle(axis: Axes, tree: PackedTree) -> None:
    """Draws a forest as blocks of tokens that the same samples share.

    A block reaches over all tokens that it is context of, so the coloured area is what
    attention computes; the tokens themselves are its slanted side, in orange where trained.
    """
    shared = np.maximum(sharing(tree), 1)
    start, stop = blocks(tree, shared)
    depth, exit_ = tree.depth, tree.exit
    low, high = depth[start], depth[stop - 1] + 1
    corners = [(start, low), (exit_[start], low), (exit_[start], high), (stop, high)]
    polygons = PolyCollection(
        list(np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)),
        array=shared[start],
        cmap="YlGnBu",
        norm=LogNorm(1, max(2, int(shared.max()))),
        edgecolors="white",
        linewidths=0.3,
    )
    axis.add_collection(polygons)
    begin, end = _runs(trained(tree))
    marks = np.stack([begin, depth[begin], end, depth[end - 1] + 1], axis=1)
    lines = list(marks.reshape(-1, 2, 2))
    axis.add_collection(LineCollection(lines, colors=TRAINED, linewidths=2))
    axis.set_xlim(0, tree.n_tokens)
    axis.set_ylim(int(depth[: tree.n_tokens].max()) + 1, 0)
    axis.set_xlabel("token, in depth-first order")
    axis.set_ylabel("depth")
    axis.set_title(f"{tree.n_tokens:,} unique tokens; trained ones in orange")
    ticks = [tick for tick in TICKS if tick <= shared.max()]
    colours = axis.figure.colorbar(polygons, ax=axis, pad=0.01, ticks=ticks, format="{x:g}")
    colours.minorticks_off()
    colours.set_label("samples that share a token")


def draw_tiles(axis: Axes, plan: TilePlan) -> None:
    """Draws which tiles of a plan in the "tiles" layout are visited."""
    kinds = tile_kinds(plan)
    live, full = int((kinds != DEAD).sum()), int((kinds == FULL).sum())
    triangle = len(kinds) * (len(kinds) + 1) // 2
    _image(axis, kinds, TILE_COLOURS, 0)
    axis.set_xlabel(f"tiles of {plan.tile[1]} keys")
    axis.set_ylabel(f"tiles of {plan.tile[0]} queries")
    axis.set_title(
        f"{live:,} live tiles ({full:,} full) of {triangle:,} causal ones: {live / triangle:.1%}",
        fontsize=10,
    )
    _legend(axis, TILE_COLOURS, ("dead: skipped", "masked: some pairs seen", "full: no mask"))


def draw_mask(axis: Axes, plan: TilePlan, start: int, size: int) -> None:
    """Draws which queries from `start` on see which of the keys from there on, `size` of each."""
    here = slice(start, start + size)
    (rows, columns), live = plan.tile, tile_kinds(plan) != DEAD
    pairs = live.repeat(rows, axis=0).repeat(columns, axis=1)[here, here].astype(int) * VISITED
    pairs[visible(plan, here)] = SEEN
    _image(axis, pairs, PAIR_COLOURS, start)
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    axis.set_title(f"the exact mask of tokens {start:,} to {start + size - 1:,}", fontsize=10)
    _legend(axis, PAIR_COLOURS, ("in a dead tile", "in a live tile, not seen", "seen"))


def sharing(tree: PackedTree) -> np.ndarray:
    """How many samples train a token at or below each real token, i64[N].

    The deepest trained token of a sample has the greatest place in depth-first order.
    """
    n, m = tree.n_tokens, tree.n_occurrences
    last = np.full(int(tree.occurrence_sample[:m].max(initial=0)) + 1, -1, np.int64)
    token = tree.edge_token[tree.occurrence_edge[:m]]
    np.maximum.at(last, tree.occurrence_sample[:m], token)
    ends = np.bincount(last[last >= 0], minlength=n)
    before = np.concatenate([[0], np.cumsum(ends)])
    return before[tree.exit[:n]] - before[:n]


def blocks(tree: PackedTree, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the runs of tokens begin and end in which each is the only child of the one before
    it and is shared by as many samples, both i64[B]."""
    n = tree.n_tokens
    follows = (
        (tree.parent[1:n] == np.arange(n - 1))
        & (tree.exit[1:n] == tree.exit[: n - 1])
        & (shared[1:] == shared[:-1])
    )
    start = np.flatnonzero(np.r_[True, ~follows])
    return start, np.r_[start[1:], n]


def trained(tree: PackedTree) -> np.ndarray:
    """Which real tokens are trained, bool[N]."""
    found = np.zeros(tree.n_tokens, bool)
    found[tree.edge_token[: tree.n_edges]] = True
    return found


def tile_kinds(plan: TilePlan) -> np.ndarray:
    """DEAD, MASKED or FULL for every pair of tiles, i64[query tiles, key tiles]."""
    assert isinstance(plan.lists, Tiles), "a plan in the tiles layout"
    kinds = np.full([len(plan.q_id) // plan.tile[0], len(plan.k_id) // plan.tile[1]], DEAD)
    query, key, masked = unpack(np.asarray(plan.lists.rows)[: int(plan.lists.n_rows)])
    kinds[query, key] = np.where(masked, MASKED, FULL)
    return kinds


def visible(plan: TilePlan, here: slice) -> np.ndarray:
    """Which of some queries see which of the keys at the same places, bool[n, n]."""
    query, least = plan.q_id[here, None], plan.q_from[here, None]
    key, exit_ = plan.k_id[None, here], plan.k_exit[None, here]
    return np.asarray((least <= key) & (key <= query) & (query < exit_))


def _runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the runs of True begin and end."""
    change = np.diff(np.r_[False, mask, False].astype(int))
    return np.flatnonzero(change == 1), np.flatnonzero(change == -1)


def _image(axis: Axes, kinds: np.ndarray, colours: tuple[str, ...], start: int) -> None:
    rows, columns = kinds.shape
    axis.imshow(
        kinds,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=len(colours) - 1,
        interpolation="nearest",
        extent=(start, start + columns, start + rows, start),
    )


def _legend(axis: Axes, colours: tuple[str, ...], labels: tuple[str, ...]) -> None:
    handles = [
        Patch(facecolor=colour, edgecolor="0.6", label=label)
        for colour, label in zip(colours, labels, strict=True)
    ]
    axis.legend(handles=handles, loc="upper right", fontsize=8)
