"""Divides a forest among micro-batches within a budget of tokens.

An unpadded forest goes in; unpadded micro-batches come out. Trees stay whole where they
fit: what shares a token is computed once. The invariant: every occurrence is in exactly
one micro-batch, with its whole context.
"""

import numpy as np

from forge_jax.sched.assign import assign
from forge_jax.sched.cost import BY_TOKENS, CostModel
from forge_jax.sched.cut import SLACK, Tree, ancestors, block_starts, carries
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

BALANCE = 1.05  # of the mean cost, that the dearest of the micro-batches of all ranks may have
FINER = (1, 2, 4, 8)  # pieces an even micro-batch would have, where trees are cut for balance


def split(
    forest: PackedTree,
    budget: int,
    cost: CostModel = BY_TOKENS,
    ranks: int = 1,
    carry: bool = True,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens.

    A tree that is larger is cut between its leaves into pieces that take copies of their
    ancestors along; where one path is larger, or copies cost too much, it is carried: see
    `cut.carries`. Without `carry` copies never cost too much. Trees and pieces are spread
    evenly over as few micro-batches as hold them, which keeps their sizes alike.

    With several `ranks`, that compute one micro-batch each at a time, the number of those
    that are not carried is a multiple of `ranks` if there are pieces enough, and smaller
    trees are cut too, the largest first, until the dearest micro-batch is within `BALANCE`
    of the mean cost or finer pieces make it no cheaper.
    """
    pieces = Tree(forest, 0, forest.n_tokens, cost)
    start, alone = _pieces(forest, budget, cost, carry)
    part = _spread(forest, start, alone, pieces, budget, ranks)
    even, dearest = _dearest(pieces.pieces(start)[~alone], part[~alone], ranks)
    for finer in FINER if ranks > 1 else ():
        if dearest <= BALANCE * even:
            break
        tried, tried_alone = _pieces(forest, budget, cost, carry, even / finer)
        tried_part = _spread(forest, tried, tried_alone, pieces, budget, ranks)
        price = pieces.pieces(tried)[~tried_alone]
        _, tried_dearest = _dearest(price, tried_part[~tried_alone], ranks)
        if tried_dearest < dearest:
            start, alone, part, dearest = tried, tried_alone, tried_part, tried_dearest
    whole = int(part[~alone].max(initial=-1)) + 1
    parts = divide(forest, start, part)
    return [*parts[:whole], *(_carried(tree, budget) for tree in parts[whole:])]


def _pieces(
    forest: PackedTree, budget: int, cost: CostModel, carry: bool, dearest: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """First tokens of the pieces, ascending, and which of those are trees to be carried.

    A tree beyond `budget`, or dearer than `dearest`, is cut.
    """
    index = np.arange(forest.n_tokens)
    heads = index[forest.parent[: forest.n_tokens] == index]
    price = Tree(forest, 0, forest.n_tokens, cost).pieces(heads)
    starts, alone = [], []
    for lo, hi, seconds in zip(heads.tolist(), forest.exit[heads].tolist(), price, strict=True):
        cuts, carried = np.array([lo]), False
        if hi - lo > budget or seconds > dearest:
            tree = Tree(forest, lo, hi, cost)
            parts = 1 if dearest == np.inf else int(-(-seconds // dearest))
            slack = SLACK if dearest == np.inf else 1.0
            found = tree.cut(budget, parts, slack)
            if hi - lo > budget:
                carried = found is None or (carry and carries(tree, found, budget))
            cuts = cuts if found is None or carried else found
        starts.append(cuts)
        alone.append(np.full(len(cuts), carried))
    return np.concatenate(starts), np.concatenate(alone)


def _spread(
    forest: PackedTree, start: np.ndarray, alone: np.ndarray, pieces: Tree, budget: int, ranks: int
) -> np.ndarray:
    """Part of each piece; those that are `alone` come last, a part for each."""
    size = np.diff(start, append=forest.n_tokens) + forest.depth[start]
    load = size if ranks == 1 else pieces.pieces(start)
    part = np.empty(len(start), np.int64)
    part[~alone] = spread(size[~alone], load[~alone], budget, ranks)
    part[alone] = part[~alone].max(initial=-1) + 1 + np.arange(alone.sum())
    return part


def _dearest(price: np.ndarray, part: np.ndarray, ranks: int) -> tuple[float, float]:
    """Mean and largest cost of the parts, of which every rank has as many."""
    each = -(-(int(part.max(initial=-1)) + 1) // ranks)
    load = np.bincount(part, weights=price, minlength=max(each, 1) * ranks)
    return float(load.mean()), float(load.max())


def _carried(tree: PackedTree, budget: int) -> CarriedTree:
    start = block_starts(tree.depth, tree.exit, budget)
    return CarriedTree(tree=tree, start=start, sizes=np.diff(start, append=tree.n_tokens))


def spread(size: np.ndarray, load: np.ndarray, budget: int, ranks: int = 1) -> np.ndarray:
    """Part i64[P] of each piece such that the loads are even and no part has more than
    `budget` tokens, as no piece has; as few parts as that allows, a multiple of `ranks`."""
    # Two that are larger than half the budget never share a part.
    parts = max(int(-(-size.sum() // budget)), int((2 * size > budget).sum()), 1)
    parts = -(-parts // ranks) * ranks
    while True:
        part = assign(load, parts)
        if np.bincount(part, weights=size, minlength=1).max() <= budget:
            return part
        parts += ranks


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
    owned = list(tokens)
    root = np.maximum.accumulate(np.where(forest.depth[start] == 0, start, 0))
    for piece in np.flatnonzero(forest.depth[start] > 0).tolist():
        at = int(part[piece])
        above = ancestors(forest, int(root[piece]), int(start[piece]))
        tokens[at] = np.union1d(tokens[at], above)
    ends = _ending(forest)
    return [
        _take(forest, *chosen, ends)
        for chosen in zip(tokens, owned, edges, occurrences, strict=True)
    ]


def _ending(forest: PackedTree) -> np.ndarray:
    """Samples that end at each token."""
    index, ends = np.arange(forest.n_tokens), forest.multiplicity[: forest.n_tokens].copy()
    below = forest.parent[: forest.n_tokens] != index
    np.subtract.at(ends, forest.parent[: forest.n_tokens][below], ends[below].copy())
    return ends


def grouped(part: np.ndarray, parts: int) -> list[np.ndarray]:
    """For each part its places in `part`, ascending."""
    order = np.argsort(part, kind="stable")
    return np.split(order, np.searchsorted(part[order], np.arange(1, parts)))


def _take(
    forest: PackedTree,
    tokens: np.ndarray,
    owned: np.ndarray,
    edges: np.ndarray,
    occurrences: np.ndarray,
    ends: np.ndarray,
) -> PackedTree:
    """Some tokens of `forest` with all their ancestors, renumbered; the arguments are
    ascending places, and the samples that end at each token. Those that end at tokens not
    `owned` are counted elsewhere."""

    def place(among: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.searchsorted(among, of).astype(np.int32)

    exit_ = place(tokens, forest.exit[tokens])
    ended = np.zeros(len(tokens) + 1)  # samples that ended before each token
    ended[1:] = np.cumsum(np.where(np.isin(tokens, owned, True), ends[tokens], 0))
    return PackedTree(
        tokens=forest.tokens[tokens],
        depth=forest.depth[tokens],
        parent=place(tokens, forest.parent[tokens]),
        exit=exit_,
        edge_token=place(tokens, forest.edge_token[edges]),
        edge_temperature=forest.edge_temperature[edges],
        edge_support=None if forest.edge_support is None else forest.edge_support.at(edges),
        occurrence_edge=place(edges, forest.occurrence_edge[occurrences]),
        occurrence_sample=forest.occurrence_sample[occurrences],
        old_logp=forest.old_logp[occurrences],
        advantage=forest.advantage[occurrences],
        weight=forest.weight[occurrences],
        occurrence_index=forest.occurrence_index[occurrences],
        multiplicity=(ended[exit_] - ended[:-1]).astype(np.float32),
        routes=None if forest.routes is None else forest.routes[tokens],
        n_tokens=len(tokens),
        n_edges=len(edges),
        n_occurrences=len(occurrences),
        others={name: x[occurrences] for name, x in forest.others.items()},
    )


def forest_of(part: MicroBatch) -> PackedTree:
    """What a micro-batch computes, in one piece."""
    return part.tree if isinstance(part, CarriedTree) else part
