"""The blocks of a carried tree, as the device computes them.

A `CarriedTree` goes in; padded blocks come out, made one at a time. The invariant: an edge
belongs to the block of the token that predicts it, so no hidden state crosses a block; keys
and values do, of those tokens alone that have descendants in a later block. These are the
trunk, a tree of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.drawing import Support
from forge_jax.sched.cut import trunk_of
from forge_jax.sched.ladder import OCCURRENCES_GROWTH, bucket, edges_rung, fill
from forge_jax.sched.split import grouped
from forge_jax.types import NO_ROUTE, CarriedTree, PackedTree

CONTEXT_GROWTH = 2  # from rung to rung of a context, whose padding attention never visits
SMALLEST_CONTEXT = 256
TRUNK_GROWTH = 1.25


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
    context: np.ndarray  # i32[S], slots of the ancestors that are read
    context_id: np.ndarray  # i32[S], ascending, 0 at padding
    context_exit: np.ndarray  # i32[S], 0 at padding
    source: np.ndarray  # i32[E], place in the block of the token that predicts the edge
    label: np.ndarray  # i32[E], id that it predicts
    temperature: np.ndarray  # f32[E]
    support: Support | None  # [E]
    occurrence_edge: np.ndarray  # i32[M]
    old_logp: np.ndarray  # f32[M]
    advantage: np.ndarray  # f32[M]
    weight: np.ndarray  # f32[M], 0 at padding
    others: Mapping[str, np.ndarray]  # f32[M] each, as in `PackedTree`
    multiplicity: np.ndarray  # f32[N], as in `PackedTree`
    routes: np.ndarray | None
    occurrence_index: np.ndarray  # i64[M], -1 at padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """How a carried tree lies in blocks."""

    tree: PackedTree
    bounds: np.ndarray  # i64[B + 1], first token of each block, and the end
    sizes: np.ndarray  # i64[B], padded tokens of each block
    trunk: np.ndarray  # i64[K], ascending, the tokens that are kept; slot i is that of trunk[i]
    trunk_size: int  # padded tokens of a block of the trunk
    context: int  # smallest padded context
    edges: Sequence[np.ndarray]  # of each block, their places
    occurrences: Sequence[np.ndarray]
    n_edges: np.ndarray  # i64[B], padded numbers, as many in blocks of as many tokens
    n_occurrences: np.ndarray

    @property
    def number(self) -> int:
        """Blocks of the tree."""
        return len(self.bounds) - 1

    @property
    def trunk_number(self) -> int:
        """Blocks of the trunk."""
        return -(-len(self.trunk) // self.trunk_size)


def lay_out(carried: CarriedTree) -> Blocks:
    """The blocks of a tree and of its trunk, in order; `block` and `trunk_block` make them."""
    tree, sizes = carried.tree, carried.sizes
    of_edge = np.searchsorted(carried.start, tree.parent[tree.edge_token], "right") - 1
    edges = grouped(of_edge, len(sizes))
    occurrences = grouped(of_edge[tree.occurrence_edge], len(sizes))
    most = np.array([[len(e), len(m)] for e, m in zip(edges, occurrences, strict=True)])
    shared = np.array([most[sizes == size].max(axis=0) for size in sizes])
    n_edges = [edges_rung(int(e), int(n)) for (e, _), n in zip(shared, sizes, strict=True)]
    n_occurrences = [
        bucket(int(m), e, OCCURRENCES_GROWTH, 1) for (_, m), e in zip(shared, n_edges, strict=True)
    ]
    trunk, largest = trunk_of(tree.exit, carried.start), int(sizes.max())
    even = -(-len(trunk) // max(1, -(-len(trunk) // largest)))
    deepest = int(tree.depth[carried.start].max())
    return Blocks(
        tree=tree,
        bounds=np.append(carried.start, tree.n_tokens),
        sizes=sizes,
        trunk=trunk,
        trunk_size=min(largest, bucket(even, SMALLEST_CONTEXT, TRUNK_GROWTH, 1)),
        context=min(largest, bucket(deepest, SMALLEST_CONTEXT, CONTEXT_GROWTH, 1)),
        edges=edges,
        occurrences=occurrences,
        n_edges=np.array(n_edges),
        n_occurrences=np.array(n_occurrences),
    )


def block(blocks: Blocks, number: int) -> Block:
    """Block `number`, its context padded to a rung of a ladder."""
    return _padded(
        blocks,
        np.arange(*blocks.bounds[number : number + 2]),
        (int(x[number]) for x in (blocks.sizes, blocks.n_edges, blocks.n_occurrences)),
        blocks.edges[number],
        blocks.occurrences[number],
    )


def trunk_block(blocks: Blocks, number: int) -> Block:
    """Block `number` of the trunk, which has no edges: its keys and values are wanted."""
    own = blocks.trunk[number * blocks.trunk_size : (number + 1) * blocks.trunk_size]
    none = np.zeros(0, np.int64)
    return _padded(blocks, own, (blocks.trunk_size, 1, 1), none, none)


def _padded(
    blocks: Blocks,
    own: np.ndarray,
    sizes: Iterable[int],
    edges: np.ndarray,
    occurrences: np.ndarray,
) -> Block:
    """The tokens `own`, ascending, all of whose ancestors are among them or kept before;
    `sizes` are the padded numbers of tokens, edges and occurrences."""
    tree, slots = blocks.tree, len(blocks.trunk)
    size, e, m = sizes
    ids = np.concatenate([own, tree.n_tokens + np.arange(size - len(own))]).astype(np.int32)
    above = np.flatnonzero(tree.exit[: own[0]] > own[0])
    children = tree.edge_token[edges]
    s = bucket(len(above), blocks.context, CONTEXT_GROWTH, 1)
    place = np.minimum(np.searchsorted(blocks.trunk, own), slots - 1)
    slot = np.where(blocks.trunk[place] == own, place, slots)

    def places(x: np.ndarray, length: int, value: int = 0) -> np.ndarray:
        return fill(x.astype(np.int32), length, value)

    return Block(
        tokens=fill(tree.tokens[own], size),
        depth=fill(tree.depth[own], size),
        id=ids,
        exit=np.concatenate([tree.exit[own], ids[len(own) :] + 1]).astype(np.int32),
        slot=places(slot, size, slots),
        context=places(np.searchsorted(blocks.trunk, above), s, slots),
        context_id=places(above, s),
        context_exit=fill(tree.exit[above], s),
        source=places(np.searchsorted(own, tree.parent[children]), e),
        label=fill(tree.tokens[children], e),
        temperature=fill(tree.edge_temperature[edges], e, 1),
        support=None if tree.edge_support is None else tree.edge_support.at(edges).filled(e),
        occurrence_edge=places(np.searchsorted(edges, tree.occurrence_edge[occurrences]), m),
        old_logp=fill(tree.old_logp[occurrences], m),
        advantage=fill(tree.advantage[occurrences], m),
        weight=fill(tree.weight[occurrences], m),
        others={name: fill(x[occurrences], m) for name, x in tree.others.items()},
        occurrence_index=fill(tree.occurrence_index[occurrences], m, -1),
        multiplicity=fill(tree.multiplicity[own], size),
        routes=None if tree.routes is None else fill(tree.routes[own], size, NO_ROUTE),
    )
