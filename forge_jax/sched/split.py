"""Divides a forest among micro-batches within a budget of tokens.

An unpadded forest goes in; unpadded micro-batches come out. Trees stay whole where they
fit: what shares a token is computed once. The invariant: every occurrence is in exactly
one micro-batch, with its whole context.
"""

import heapq

import numpy as np

from forge_jax.sched.cost import BY_TOKENS, CostModel
from forge_jax.sched.cut import Tree, ancestors, carries
from forge_jax.types import CarriedTree, MicroBatch, PackedTree


def split(forest: PackedTree, budget: int, cost: CostModel = BY_TOKENS) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens.

    A tree that is larger is cut between its leaves into pieces that take copies of their
    ancestors along; where one path is larger, or copies cost too much, it is carried: see
    `cut.carries`. Trees and pieces are spread evenly over as few micro-batches as hold
    them, which keeps their sizes alike.
    """
    index = np.arange(forest.n_tokens)
    heads = index[forest.parent[: forest.n_tokens] == index]
    starts, carried = [], []
    for lo, hi in zip(heads.tolist(), forest.exit[heads].tolist(), strict=True):
        cuts = np.array([lo])
        if hi - lo > budget:
            tree = Tree(forest, lo, hi, cost)
            found = tree.cut(budget)
            if found is None or carries(tree, found):
                carried.append(lo)
            else:
                cuts = found
        starts.append(cuts)
    return regroup(forest, np.concatenate(starts), np.array(carried, np.int64), budget)


def regroup(
    forest: PackedTree, start: np.ndarray, carried: np.ndarray, budget: int
) -> list[MicroBatch]:
    """Micro-batches of the pieces that begin at `start`, ascending; trees that begin at
    `carried` are one each."""
    size = np.diff(start, append=forest.n_tokens) + forest.depth[start]
    alone = np.isin(start, carried)
    part = np.empty(len(start), np.int64)
    part[~alone] = spread(size[~alone], budget)
    whole = int(part[~alone].max(initial=-1)) + 1
    part[alone] = whole + np.arange(alone.sum())
    parts = divide(forest, start, part)
    return [*parts[:whole], *(_carried(tree, budget) for tree in parts[whole:])]


def _carried(tree: PackedTree, budget: int) -> CarriedTree:
    """`tree` in as few and as even blocks as the budget allows."""
    blocks = -(-tree.n_tokens // budget)
    return CarriedTree(tree=tree, block=-(-tree.n_tokens // blocks))


def spread(size: np.ndarray, budget: int) -> np.ndarray:
    """Part i64[P] of each piece, of which none is beyond the budget: in order of their size
    each goes to the emptiest part, and there are as few parts as that allows."""
    part = np.zeros(len(size), np.int64)
    order = np.argsort(-size, kind="stable")
    # Two that are larger than half the budget never share a part.
    parts = max(int(-(-size.sum() // budget)), int((2 * size > budget).sum()), 1)
    while True:
        heap = [(0, i) for i in range(parts)]
        for piece, tokens in zip(order.tolist(), size[order].tolist(), strict=True):
            load, part[piece] = heap[0]
            heapq.heapreplace(heap, (load + tokens, int(part[piece])))
        if max(load for load, _ in heap) <= budget:
            return part
        parts += 1


def divide(forest: PackedTree, start: np.ndarray, part: np.ndarray) -> list[PackedTree]:
    """The parts of a forest: part[i] owns the tokens from start[i] to the next start, and
    copies the ancestors they have elsewhere."""
    parts = int(part.max()) + 1
    stop = np.append(start[1:], forest.n_tokens)
    part_of_token = np.repeat(part, stop - start)
    part_of_edge = part_of_token[forest.edge_token[: forest.n_edges]]
    part_of_occurrence = part_of_edge[forest.occurrence_edge[: forest.n_occurrences]]
    tokens, edges, occurrences = (
        grouped(of, parts) for of in (part_of_token, part_of_edge, part_of_occurrence)
    )
    root = np.maximum.accumulate(np.where(forest.depth[start] == 0, start, 0))
    for piece in np.flatnonzero(forest.depth[start] > 0).tolist():
        at = int(part[piece])
        above = ancestors(forest, int(root[piece]), int(start[piece]))
        tokens[at] = np.union1d(tokens[at], above)
    return [_take(forest, *chosen) for chosen in zip(tokens, edges, occurrences, strict=True)]


def grouped(part: np.ndarray, parts: int) -> list[np.ndarray]:
    """For each part its places in `part`, ascending."""
    order = np.argsort(part, kind="stable")
    return np.split(order, np.searchsorted(part[order], np.arange(1, parts)))


def _take(
    forest: PackedTree, tokens: np.ndarray, edges: np.ndarray, occurrences: np.ndarray
) -> PackedTree:
    """Some tokens of `forest` with all their ancestors, renumbered; the arguments are
    ascending places."""

    def place(among: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.searchsorted(among, of).astype(np.int32)

    return PackedTree(
        tokens=forest.tokens[tokens],
        depth=forest.depth[tokens],
        parent=place(tokens, forest.parent[tokens]),
        exit=place(tokens, forest.exit[tokens]),
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


def forest_of(part: MicroBatch) -> PackedTree:
    """What a micro-batch computes, in one piece."""
    return part.tree if isinstance(part, CarriedTree) else part
