"""Cuts a forest into micro-batches and pads them to a few sizes.

Samples go in; padded `PackedTree`s come out. A tree is never cut: what shares a token
stays together. Every size is a function of the batch alone, drawn from a short ladder,
so that few shapes are ever compiled.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from forge_jax.config import PackConfig
from forge_jax.sched.merge import merge
from forge_jax.types import PackedTree, Sample

SMALLEST_TILES = 4  # tiles of the smallest micro-batch
EDGES_PER_TOKEN = 1 / 32  # of the first rung of edges; the next ones double it
OCCURRENCES_GROWTH = 4  # from rung to rung; an occurrence is but a few scalars


def micro_batches(samples: Sequence[Sample], mode: str, cfg: PackConfig) -> list[PackedTree]:
    """The padded micro-batches of one step; none for no samples.

    `occurrence_sample` and `occurrence_index` count over all of `samples`. Raises
    ValueError as `merge` does.
    """
    if not samples:
        return []
    parts = split(merge(samples, mode), cfg.budget)
    wanted = [sizes(part, cfg) for part in parts]
    # Parts of as many tokens share the larger numbers of the rest: one shape, not several.
    shape = {n: max(size for size in wanted if size[0] == n) for n, _, _ in wanted}
    return [pad(part, *shape[n]) for part, (n, _, _) in zip(parts, wanted, strict=True)]


def bucket(n: int, smallest: int, ratio: float, multiple: int) -> int:
    """The first size >= `n` of a ladder that starts at `smallest` and grows by `ratio`.

    Every rung is rounded up to a multiple of `multiple`.
    """
    rung = _round_up(smallest, multiple)
    while rung < n:
        rung = _round_up(rung * ratio, multiple)
    return rung


def _round_up(size: float, multiple: int) -> int:
    return int(-(-size // multiple)) * multiple


def sizes(tree: PackedTree, cfg: PackConfig) -> tuple[int, int, int]:
    """Padded numbers of (tokens, edges, occurrences).

    Tokens climb a fine ladder, since every layer pays for their padding, and one that
    stops at the budget; edges and occurrences are coarse multiples of them, so that the
    three rarely move apart.
    """
    n = bucket(tree.n_tokens, SMALLEST_TILES * cfg.tile, cfg.bucket_ratio, cfg.tile)
    if tree.n_tokens <= cfg.budget:
        n = min(n, _round_up(cfg.budget, cfg.tile))
    e = bucket(tree.n_edges, max(1, int(n * EDGES_PER_TOKEN)), 2, 1)
    return n, e, bucket(tree.n_occurrences, e, OCCURRENCES_GROWTH, 1)


def split(forest: PackedTree, budget: int) -> list[PackedTree]:
    """Unpadded micro-batches of whole trees, each of at most `budget` tokens.

    A tree that is larger on its own is a micro-batch of its own. The others are spread
    evenly over as few micro-batches as hold them, which keeps their sizes alike.
    """
    index = np.arange(forest.n_tokens)
    root = forest.parent[: forest.n_tokens] == index
    heads = index[root]
    part_of_tree = _spread(forest.exit[heads] - heads, budget)
    part_of_token = part_of_tree[np.cumsum(root) - 1]
    part_of_edge = part_of_token[forest.edge_token[: forest.n_edges]]
    part_of_occurrence = part_of_edge[forest.occurrence_edge[: forest.n_occurrences]]
    tokens, edges, occurrences = (
        _grouped(part, int(part_of_tree.max()) + 1)
        for part in (part_of_token, part_of_edge, part_of_occurrence)
    )
    return [_take(forest, *chosen) for chosen in zip(tokens, edges, occurrences, strict=True)]


def _spread(size: np.ndarray, budget: int) -> np.ndarray:
    """Part of each tree, trees given largest first: each goes to the emptiest part."""
    small = size[size <= budget]
    parts = int((size > budget).sum()) + int(-(-small.sum() // budget))
    while True:
        part = np.empty(len(size), np.int64)
        heap = [(0, i) for i in range(parts)]
        for tree, tokens in enumerate(size.tolist()):
            load, part[tree] = heap[0]
            heapq.heapreplace(heap, (load + tokens, int(part[tree])))
        loads = np.bincount(part, weights=size, minlength=parts)
        if not np.any((loads > budget) & (np.bincount(part, minlength=parts) > 1)):
            return part
        parts += 1


def _grouped(part: np.ndarray, parts: int) -> list[np.ndarray]:
    """For each part its places in `part`, ascending."""
    order = np.argsort(part, kind="stable")
    return np.split(order, np.searchsorted(part[order], np.arange(1, parts)))


def _take(
    forest: PackedTree, tokens: np.ndarray, edges: np.ndarray, occurrences: np.ndarray
) -> PackedTree:
    """Some whole trees of `forest`, renumbered; the arguments are ascending places."""

    def place(among: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.searchsorted(among, of).astype(np.int32)

    return PackedTree(
        tokens=forest.tokens[tokens],
        depth=forest.depth[tokens],
        parent=place(tokens, forest.parent[tokens]),
        exit=place(tokens, forest.exit[tokens] - 1) + np.int32(1),
        edge_token=place(tokens, forest.edge_token[edges]),
        edge_temperature=forest.edge_temperature[edges],
        occurrence_edge=place(edges, forest.occurrence_edge[occurrences]),
        occurrence_sample=forest.occurrence_sample[occurrences],
        old_logp=forest.old_logp[occurrences],
        advantage=forest.advantage[occurrences],
        weight=forest.weight[occurrences],
        occurrence_index=forest.occurrence_index[occurrences],
        n_tokens=len(tokens),
        n_edges=len(edges),
        n_occurrences=len(occurrences),
    )


def pad(tree: PackedTree, n: int, e: int, m: int) -> PackedTree:
    """`tree` with its arrays padded to n tokens, e edges and m occurrences.

    Raises ValueError where a size is smaller than what is there.
    """
    for name, size, have in (
        ("n", n, tree.n_tokens),
        ("e", e, tree.n_edges),
        ("m", m, tree.n_occurrences),
    ):
        if size < have:
            raise ValueError(f"{name}={size} is less than the {have} there are")

    def fill(x: np.ndarray, size: int, value: int = 0) -> np.ndarray:
        return np.concatenate([x, np.full(size - len(x), value, x.dtype)])

    alone = np.arange(tree.n_tokens, n, dtype=np.int32)
    spare = int(tree.edge_token[0]) if tree.n_edges else 0
    return PackedTree(
        tokens=fill(tree.tokens, n),
        depth=fill(tree.depth, n),
        parent=np.concatenate([tree.parent, alone]),
        exit=np.concatenate([tree.exit, alone + 1]),
        edge_token=fill(tree.edge_token, e, spare),
        edge_temperature=fill(tree.edge_temperature, e, 1),
        occurrence_edge=fill(tree.occurrence_edge, m),
        occurrence_sample=fill(tree.occurrence_sample, m),
        old_logp=fill(tree.old_logp, m),
        advantage=fill(tree.advantage, m),
        weight=fill(tree.weight, m),
        occurrence_index=fill(tree.occurrence_index, m, -1),
        n_tokens=tree.n_tokens,
        n_edges=tree.n_edges,
        n_occurrences=tree.n_occurrences,
    )


def attention_area(tree: PackedTree) -> int:
    """Visible (query, key) pairs among the real tokens of `tree`, for one head."""
    n = tree.n_tokens
    return int((tree.exit[:n].astype(np.int64) - np.arange(n)).sum())
