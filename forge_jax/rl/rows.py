"""Rows of micro-batches: what the ranks of a mesh compute at once.

Padded `PackedTree`s go in; arrays with leading axes [places, context] come out, all ranks' of
equal shapes. Which micro-batches share a row and which rank has which tokens is no part of
any result.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from forge_jax.attention.plan import Ids, build_plans
from forge_jax.attention.tree import layout_of
from forge_jax.drawing import nothing_of, widened
from forge_jax.rl.context import Shares, share
from forge_jax.rl.costs import prior
from forge_jax.rl.forward import TILES_GROWTH, Batch, StepConfig
from forge_jax.rl.supports import Supports, to_device
from forge_jax.sched.cost import sizes_of
from forge_jax.sched.ladder import OCCURRENCES_GROWTH, bucket, fill
from forge_jax.types import NO_ROUTE, PackedTree

EDGES_GROWTH = 1.25  # from rung to rung above a rank's share of the padded edges


class Row(NamedTuple):
    """One micro-batch for each place of a mesh."""

    batch: Batch  # every array [places, context, ...]
    places: np.ndarray  # i64[places * context, M], `PackedTree.occurrence_index` of each rank


def rows(trees: Sequence[PackedTree], places: int, cfg: StepConfig) -> list[list[PackedTree]]:
    """Micro-batches in rows of `places`, one for each; empty ones fill the last row up.

    A row is padded to its largest member and takes as long as its costliest, so its members
    are next to each other by cost. Within a row the costliest goes to the place that has had
    least so far.
    """
    if not trees:
        return []
    cost = prior(cfg.model).seconds(np.array([sizes_of(tree, cfg.tile) for tree in trees]))
    order = np.argsort(-cost, kind="stable")
    had, made = np.zeros(places), []
    for at in range(0, len(order), places):
        row = [NOTHING] * places
        members = order[at : at + places]
        for place, member in zip(np.argsort(had, kind="stable"), members, strict=False):
            row[place] = trees[member]
            had[place] += cost[member]
        made.append(row)
    return made


def lay_out(trees: Sequence[PackedTree], ranks: int, cfg: StepConfig) -> Row:
    """The arrays of one row, the tokens of each member dealt out to `ranks` ranks.

    Padded sizes follow from those of the longest members, so that where these are alike, so
    are those of rows, unless what a rank has is far from its share.
    """
    longest, edges, occurrences = (
        max(len(arrays) for arrays in members)
        for members in zip(
            *((t.tokens, t.edge_token, t.occurrence_edge) for t in trees), strict=True
        )
    )
    length = -(-longest // (ranks * cfg.tile)) * cfg.tile
    dealt = [share(tree, ranks, length, cfg.tile) for tree in trees]
    edges = _rung([s.edges for s in dealt], edges, ranks, EDGES_GROWTH)
    occurrences = _rung([s.occurrences for s in dealt], occurrences, ranks, OCCURRENCES_GROWTH)
    smallest = 4 * (length // cfg.tile)

    plans = build_plans(
        [ids for pair in zip(trees, dealt, strict=True) for ids in _ids(*pair)],
        tile=cfg.tile,
        layout=layout_of(cfg.attention, cfg.dtype),
        bucket=lambda listed: bucket(listed, smallest, TILES_GROWTH, 1),
    )
    routed = next((tree.routes for tree in trees if tree.routes is not None), None)
    widths = [t.edge_support.ids.shape[1] for t in trees if t.edge_support is not None]
    others = {name for tree in trees for name in tree.others}
    parts = [
        _part(tree, shares, rank, edges, occurrences, routed)
        | {"others": _others(tree, shares.occurrences[rank], occurrences, others)}
        | {"support": _support(tree, shares.edges[rank], edges, max(widths, default=0))}
        for tree, shares in zip(trees, dealt, strict=True)
        for rank in range(ranks)
    ]
    fields: dict[str, Any] = {
        name: jax.tree.map(lambda *x: np.stack(x), *(part[name] for part in parts))
        for name in parts[0]
    }
    places = fields.pop("places")
    batch = Batch(**fields, plan=jax.tree.map(lambda *x: np.stack(x), *plans))
    shape = (len(trees), ranks)
    return Row(jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch), places)


def _rung(dealt: Sequence[list[np.ndarray]], padded: int, ranks: int, growth: float) -> int:
    """The padded number of what most of is on one rank, where a micro-batch has `padded`."""
    most = max(map(len, chain.from_iterable(dealt)))
    return bucket(most, max(1, -(-padded // ranks)), growth, 1)


def _ids(tree: PackedTree, shares: Shares) -> list[Ids]:
    """Each rank's queries against the keys of all, in order of the ranks."""
    keys = shares.tokens.reshape(-1)
    exit_ = np.arange(1, len(keys) + 1)  # padding sees itself alone
    exit_[: tree.n_tokens] = tree.exit[: tree.n_tokens]
    return [Ids(queries, keys, exit_[keys]) for queries in shares.tokens]


def _part(
    tree: PackedTree,
    shares: Shares,
    rank: int,
    edges: int,
    occurrences: int,
    routed: np.ndarray | None,
) -> dict[str, Any]:
    """The arrays of a `Batch` that one rank has, but the plan; and their `places`. `routed` are
    the routes of some micro-batch of the row, None where none has any."""
    n, edge, occurrence = tree.n_tokens, shares.edges[rank], shares.occurrences[rank]
    tokens = shares.tokens[rank]
    real = tokens[tokens < n]  # padding comes last in the order
    place = np.argsort(shares.tokens, axis=None).astype(np.int32)  # of a token among all ranks'
    child = tree.edge_token[edge]
    return {
        "tokens": fill(tree.tokens[real], len(tokens)),
        "depth": fill(tree.depth[real], len(tokens)),
        "parent": fill(place[tree.parent[real]], len(tokens)),
        "source": fill(_places(tokens, tree.parent[child]), edges),
        "label": fill(tree.tokens[child], edges),
        "temperature": fill(tree.edge_temperature[edge], edges, 1),
        "occurrence_edge": fill(_places(edge, tree.occurrence_edge[occurrence]), occurrences),
        "old_logp": fill(tree.old_logp[occurrence], occurrences),
        "advantage": fill(tree.advantage[occurrence], occurrences),
        "weight": fill(tree.weight[occurrence], occurrences),
        "multiplicity": fill(tree.multiplicity[real], len(tokens)),
        "routes": None
        if routed is None
        else fill(_routes(tree, routed)[real], len(tokens), NO_ROUTE),
        "places": fill(tree.occurrence_index[occurrence], occurrences, -1),
    }


def _support(tree: PackedTree, edge: np.ndarray, edges: int, width: int) -> Supports | None:
    """Of a rank's edges, as wide as any in the row; None where no micro-batch has any."""
    if not width:
        return None
    own = nothing_of(len(edge), width) if tree.edge_support is None else tree.edge_support.at(edge)
    return to_device(widened(own, width).filled(edges))


def _others(
    tree: PackedTree, occurrence: np.ndarray, occurrences: int, names: set[str]
) -> dict[str, np.ndarray]:
    """Of a rank's occurrences; an empty micro-batch lacks what the others in its row have."""
    none = np.zeros(len(tree.weight), np.float32)
    return {n: fill(tree.others.get(n, none)[occurrence], occurrences) for n in sorted(names)}


def _routes(tree: PackedTree, like: np.ndarray) -> np.ndarray:
    """Those of `tree`, none where it is empty."""
    return np.zeros((0, *like.shape[1:]), like.dtype) if tree.routes is None else tree.routes


def _places(among: np.ndarray, of: np.ndarray) -> np.ndarray:
    return np.searchsorted(among, of).astype(np.int32)


def _nothing() -> PackedTree:
    i32, f32 = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return PackedTree(
        tokens=i32,
        depth=i32,
        parent=i32,
        exit=i32,
        edge_token=i32,
        edge_temperature=f32,
        edge_support=None,
        occurrence_edge=i32,
        occurrence_sample=i32,
        old_logp=f32,
        advantage=f32,
        weight=f32,
        occurrence_index=np.zeros(0, np.int64),
        multiplicity=f32,
        routes=None,
        n_tokens=0,
        n_edges=0,
        n_occurrences=0,
    )


NOTHING = _nothing()  # a micro-batch without a token
