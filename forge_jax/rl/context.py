"""Context parallelism: which rank computes which tokens.

A micro-batch goes in; the places of each rank's tokens, edges and occurrences come out. Every
token is on exactly one rank, its edges and occurrences with it, and a rank's tokens ascend in
the depth-first order, so that the queries that see a key stay together.
"""

from typing import NamedTuple

import numpy as np

from forge_jax.types import PackedTree


class Shares(NamedTuple):
    """Places in a `PackedTree` of what each of R ranks computes."""

    tokens: np.ndarray  # i64[R, L], ascending in each row; what is >= n_tokens is padding
    edges: list[np.ndarray]  # R of i64[E], ascending
    occurrences: list[np.ndarray]  # R of i64[M], ascending


def share(tree: PackedTree, ranks: int, length: int, chunk: int) -> Shares:
    """Deals the tokens of `tree`, padded to ``ranks * length``, out in chunks of `chunk`.

    Every rank has `length` tokens, a multiple of `chunk`, and as equal as can be a share of
    the visible (query, key) pairs and of the edges. An edge is on the rank of the token that
    predicts it, an occurrence on that of its edge.
    """
    source = tree.parent[tree.edge_token[: tree.n_edges]]
    area, edges = np.zeros((2, ranks * length))
    query = np.arange(tree.n_tokens)
    gone = np.searchsorted(np.sort(tree.exit[: tree.n_tokens]), query, side="right")
    area[: tree.n_tokens] = query + 1 - gone  # the tokens so far, but those whose subtree ended
    np.add.at(edges, source, 1.0)
    load = np.stack([x.reshape(-1, chunk).sum(1) for x in (area, edges)], axis=1)
    dealt = deal(load, ranks)
    tokens = (dealt[:, :, None] * chunk + np.arange(chunk)).reshape(ranks, length)
    rank_of_chunk = np.empty(len(load), np.int64)
    rank_of_chunk[dealt] = np.arange(ranks)[:, None]
    rank_of_edge = rank_of_chunk[source // chunk]
    rank_of_occurrence = rank_of_edge[tree.occurrence_edge[: tree.n_occurrences]]
    return Shares(
        tokens=tokens,
        edges=[np.flatnonzero(rank_of_edge == rank) for rank in range(ranks)],
        occurrences=[np.flatnonzero(rank_of_occurrence == rank) for rank in range(ranks)],
    )


def deal(load: np.ndarray, ranks: int) -> np.ndarray:
    """Chunks i64[R, C/R] of each rank, ascending, as many on each; `load` is f64[C, kinds].

    The heaviest chunk first, each goes to the rank that has least of what it brings, each
    kind of load as a share of its total.
    """
    share = load / np.maximum(load.sum(axis=0), 1e-300)
    total = np.zeros((ranks, load.shape[1]))
    free = np.full(ranks, len(load) // ranks)
    rank_of = np.empty(len(load), np.int64)
    for chunk in np.argsort(-share.sum(axis=1), kind="stable"):
        clash = np.where(free > 0, total @ share[chunk], np.inf)
        rank = rank_of[chunk] = int(clash.argmin())
        total[rank] += share[chunk]
        free[rank] -= 1
    return np.argsort(rank_of, kind="stable").reshape(ranks, -1)
