"""Packs samples into micro-batches of a few sizes.

Samples go in; padded micro-batches come out. Every size is a function of the batch alone,
drawn from a short ladder, so that few shapes are ever compiled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from forge_jax.config import MeshConfig, PackConfig
from forge_jax.sched.cost import BY_TOKENS, CostModel
from forge_jax.sched.ladder import OCCURRENCES_GROWTH, bucket, edges_rung, fill, round_up
from forge_jax.sched.merge import merge
from forge_jax.sched.split import forest_of, split
from forge_jax.types import NO_ROUTE, MicroBatch, PackedTree, Sample

ONE_DEVICE = MeshConfig()
SMALLEST_TILES = 4  # tiles of the smallest micro-batch
WASTE = 1.02  # padded over real tokens, up to which parts of other sizes share one
EDGES_GROWTH = 4  # rungs of tokens to one of edges, which at most doubles


def micro_batches(
    samples: Sequence[Sample],
    mode: str,
    cfg: PackConfig,
    cost: CostModel = BY_TOKENS,
    mesh: MeshConfig = ONE_DEVICE,
    carry: bool = True,
) -> list[MicroBatch]:
    """The padded micro-batches of one step, none above the budget; none for no samples.

    The budget is that of each rank which the tokens of a micro-batch are cut over, and there
    are as many micro-batches as keep every place of the mesh busy, if trees suffice.
    A tree beyond the budget is cut or carried, on one device whichever is cheaper by `cost`:
    see `split`. Without `carry` it is carried only where it cannot be cut.
    `occurrence_sample` and `occurrence_index` count over all of `samples`. Raises
    ValueError as `merge` does.
    """
    if not samples:
        return []
    cfg = replace(cfg, budget=cfg.budget * mesh.context)
    cost, alone = cost.without_tiles(cfg.side), mesh == ONE_DEVICE
    parts = split(merge(samples, mode), cfg.budget, cost, mesh.places, carry=carry and alone)
    packed = [part for part in parts if isinstance(part, PackedTree)]
    shapes = iter(_shapes(packed, cfg))
    return [
        pad(part, *next(shapes))
        if isinstance(part, PackedTree)
        else replace(part, sizes=_block_sizes(part.sizes, cfg))
        for part in parts
    ]


def _block_sizes(tokens: np.ndarray, cfg: PackConfig) -> np.ndarray:
    """Padded tokens of each block, as few different ones as little padding allows."""
    rungs = [min(rung(n, cfg), cfg.budget) for n in tokens.tolist()]
    joined = _joined(rungs, WASTE * float(tokens.sum()) - sum(rungs))
    return np.array([joined[n] for n in rungs])


def _shapes(parts: Sequence[PackedTree], cfg: PackConfig) -> list[tuple[int, int, int]]:
    """Padded sizes of each part, as few different ones as little padding allows."""
    wanted = [sizes(part, cfg) for part in parts]
    rungs = [n for n, _, _ in wanted]
    joined = _joined(rungs, WASTE * sum(part.n_tokens for part in parts) - sum(rungs))
    # Parts of as many tokens share the larger numbers of the rest: one shape, not several.
    shape: dict[int, tuple[int, int, int]] = {}
    for n, e, m in wanted:
        _, edges, occurrences = shape.get(joined[n], (0, 0, 0))
        shape[joined[n]] = (joined[n], max(e, edges), max(m, occurrences))
    return [shape[joined[n]] for n in rungs]


def _joined(rungs: Sequence[int], spare: float) -> dict[int, int]:
    """The size that each size is raised to, where raising sizes to the next one among them
    costs at most `spare` tokens in all; the cheapest first."""
    count = Counter(rungs)
    groups = [[size] for size in sorted(count)]
    while len(groups) > 1:
        costs = [
            sum(count[size] for size in low) * (high[-1] - low[-1])
            for low, high in pairwise(groups)
        ]
        at = int(np.argmin(costs))
        spare -= costs[at]
        if spare < 0:
            break
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return {size: group[-1] for group in groups for size in group}


def rung(tokens: int, cfg: PackConfig) -> int:
    """The padded number of `tokens`, which are within the budget."""
    n = bucket(tokens, SMALLEST_TILES * cfg.side, cfg.bucket_ratio, cfg.side)
    return min(n, round_up(cfg.budget, cfg.side))


def sizes(tree: PackedTree, cfg: PackConfig) -> tuple[int, int, int]:
    """Padded numbers of (tokens, edges, occurrences).

    Tokens climb a fine ladder, since every layer pays for their padding, and one that
    stops at the budget; edges and occurrences are coarse multiples of them, so that the
    three rarely move apart.
    """
    n = rung(tree.n_tokens, cfg)
    growth = min(2.0, cfg.bucket_ratio**EDGES_GROWTH)
    e = edges_rung(tree.n_edges, n, growth)
    return n, e, bucket(tree.n_occurrences, e, OCCURRENCES_GROWTH, 1)


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

    alone = np.arange(tree.n_tokens, n, dtype=np.int32)
    spare = int(tree.edge_token[0]) if tree.n_edges else 0
    return PackedTree(
        tokens=fill(tree.tokens, n),
        depth=fill(tree.depth, n),
        parent=np.concatenate([tree.parent, alone]),
        exit=np.concatenate([tree.exit, alone + 1]),
        edge_token=fill(tree.edge_token, e, spare),
        edge_temperature=fill(tree.edge_temperature, e, 1),
        edge_support=None if tree.edge_support is None else tree.edge_support.filled(e),
        occurrence_edge=fill(tree.occurrence_edge, m),
        occurrence_sample=fill(tree.occurrence_sample, m),
        old_logp=fill(tree.old_logp, m),
        advantage=fill(tree.advantage, m),
        weight=fill(tree.weight, m),
        occurrence_index=fill(tree.occurrence_index, m, -1),
        multiplicity=fill(tree.multiplicity, n),
        routes=None if tree.routes is None else fill(tree.routes, n, NO_ROUTE),
        n_tokens=tree.n_tokens,
        n_edges=tree.n_edges,
        n_occurrences=tree.n_occurrences,
        others={name: fill(x, m) for name, x in tree.others.items()},
    )


def attention_area(part: MicroBatch) -> int:
    """Visible (query, key) pairs among the real tokens of a micro-batch, for one head."""
    tree = forest_of(part)
    n = tree.n_tokens
    return int((tree.exit[:n].astype(np.int64) - np.arange(n)).sum())
