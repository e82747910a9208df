"""The blocks of a carried tree, as the device computes them.

A `CarriedTree` goes in; padded blocks come out, made one at a time. The invariant: an edge
belongs to the block of the token that predicts it, so no hidden state crosses a block; keys
and values do, of those tokens alone that have descendants in a later block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.sched.ladder import OCCURRENCES_GROWTH, bucket, edges_rung
from forge_jax.sched.split import grouped
from forge_jax.types import CarriedTree, PackedTree

CONTEXT_GROWTH = 2  # from rung to rung of a context, whose padding attention never visits


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One block. Ids are places in the whole tree; those of padding lie past its end.

    Query i sees key j iff ``id[j] <= id[i] < exit[j]``, whether j is of the block or of its
    context.
    """

    tokens: np.ndarray  # i32[N]
    depth: np.ndarray  # i32[N]
    id: np.ndarray  # i32[N]
    exit: np.ndarray  # i32[N]
    slot: np.ndarray  # i32[N], where keys and values are kept; past the last where they are not
    kept: int  # tokens that are kept
    context: np.ndarray  # i32[S], slots of the ancestors that are read
    context_id: np.ndarray  # i32[S], ascending, 0 at padding
    context_exit: np.ndarray  # i32[S], 0 at padding
    source: np.ndarray  # i32[E], place in the block of the token that predicts the edge
    label: np.ndarray  # i32[E], id that it predicts
    temperature: np.ndarray  # f32[E]
    occurrence_edge: np.ndarray  # i32[M]
    old_logp: np.ndarray  # f32[M]
    advantage: np.ndarray  # f32[M]
    weight: np.ndarray  # f32[M], 0 at padding
    occurrence_index: np.ndarray  # i64[M], -1 at padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """How a carried tree lies in blocks."""

    tree: PackedTree
    size: int  # tokens of a block
    slots: int  # tokens that are kept for later blocks
    slot: np.ndarray  # i32[N], of each token; `slots` where it is not kept
    edges: Sequence[np.ndarray]  # of each block, their places
    occurrences: Sequence[np.ndarray]
    n_edges: int  # padded numbers, for all blocks
    n_occurrences: int


def lay_out(carried: CarriedTree) -> Blocks:
    """The blocks of a tree, in order; `block` makes each of them."""
    tree, size = carried.tree, carried.block
    n = tree.n_tokens
    parts = -(-n // size)
    index = np.arange(n)
    kept = tree.exit > np.minimum((index // size + 1) * size, n)
    of_edge = tree.parent[tree.edge_token] // size
    edges = grouped(of_edge, parts)
    occurrences = grouped(of_edge[tree.occurrence_edge], parts)
    n_edges = edges_rung(max(map(len, edges)), size)
    return Blocks(
        tree=tree,
        size=size,
        slots=int(kept.sum()),
        slot=np.where(kept, np.cumsum(kept) - 1, kept.sum()).astype(np.int32),
        edges=edges,
        occurrences=occurrences,
        n_edges=n_edges,
        n_occurrences=bucket(max(map(len, occurrences)), n_edges, OCCURRENCES_GROWTH, 1),
    )


def block(blocks: Blocks, number: int) -> Block:
    """Block `number`, padded to the sizes that all blocks of the tree share; its context to
    a rung of a ladder that starts at the size of a block."""
    tree, size = blocks.tree, blocks.size
    lo = number * size
    own = np.arange(lo, min(lo + size, tree.n_tokens))
    above = np.flatnonzero(tree.exit[:lo] > lo)
    ids = np.concatenate([own, tree.n_tokens + np.arange(size - len(own))]).astype(np.int32)
    edges, occurrences = blocks.edges[number], blocks.occurrences[number]
    children = tree.edge_token[edges]
    s = bucket(len(above), size, CONTEXT_GROWTH, 1)
    e, m = blocks.n_edges, blocks.n_occurrences

    def fill(x: np.ndarray, length: int, value: int = 0) -> np.ndarray:
        return np.concatenate([x, np.full(length - len(x), value, x.dtype)])

    return Block(
        tokens=fill(tree.tokens[own], size),
        depth=fill(tree.depth[own], size),
        id=ids,
        exit=np.concatenate([tree.exit[own], ids[len(own) :] + 1]).astype(np.int32),
        slot=fill(blocks.slot[own], size, blocks.slots),
        kept=int((blocks.slot[own] < blocks.slots).sum()),
        context=fill(blocks.slot[above], s, blocks.slots),
        context_id=fill(above.astype(np.int32), s),
        context_exit=fill(tree.exit[above], s),
        source=fill((tree.parent[children] - lo).astype(np.int32), e),
        label=fill(tree.tokens[children], e),
        temperature=fill(tree.edge_temperature[edges], e, 1),
        occurrence_edge=fill(
            np.searchsorted(edges, tree.occurrence_edge[occurrences]).astype(np.int32), m
        ),
        old_logp=fill(tree.old_logp[occurrences], m),
        advantage=fill(tree.advantage[occurrences], m),
        weight=fill(tree.weight[occurrences], m),
        occurrence_index=fill(tree.occurrence_index[occurrences], m, -1),
    )
