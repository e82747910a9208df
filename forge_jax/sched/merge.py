"""Merges samples that share prefixes, so that a token with the same context is computed once.

Samples go in; one unpadded `PackedTree` comes out, in depth-first order. Forward work is
shared, targets never are: every trained token of every sample is exactly one occurrence,
on the edge whose path from its root spells the sample up to that token.

Everything follows from one *node map*: the tree token that each token of the concatenated
samples became.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.sched.routes import digests, stacked
from forge_jax.sched.supports import edge_kinds, of_trained
from forge_jax.types import PackedTree, Sample

MODES = ("tree", "chain", "none")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flat:
    """The samples one after another."""

    tokens: np.ndarray  # i32[L]
    key: np.ndarray  # integers [L], equal where the tokens and their other inputs are
    sample: np.ndarray  # i64[L], which sample a token is of
    position: np.ndarray  # i64[L], place within its sample
    start: np.ndarray  # i64[S], first token of each sample
    length: np.ndarray  # i64[S]
    routes: np.ndarray | None  # int[L, layers, k]


def merge(samples: Sequence[Sample], mode: str = "tree") -> PackedTree:
    """The forest of `samples`, unpadded, the heaviest child first at every branch.

    Two tokens agree if their ids, their `inputs` and their `routes` do. A sample without
    routes beside some that have them leaves every choice to the router.

    - "tree": the full prefix tree; two samples share a token if it and its whole context
      agree. The heaviest child has the most unique tokens in its subtree, ties going to
      the child with the lowest sample; the roots are ordered alike.
    - "chain": every tree is one row. A sample joins the longest earlier row that equals a
      prefix of its context before its first trained token (ties to the lower row), and the
      row becomes that sample; so each row is extended by one sample at a time.
    - "none": every sample is a row of its own.

    Raises ValueError on an unknown mode, no samples, or a trained sample whose temperature
    is not positive.
    """
    if not samples:
        raise ValueError("no samples to merge")
    flat = _flatten(samples)
    mask = np.concatenate([sample.mask for sample in samples]).astype(bool)
    if mode == "tree":
        node = _heaviest_first(flat, _lexicographic(flat))
    elif mode == "chain":
        first = np.where(mask, flat.position, flat.length[flat.sample])
        node = _in_rows(flat, _chains(flat, np.minimum.reduceat(first, flat.start)))
    elif mode == "none":
        node = _in_rows(flat, np.arange(len(samples)))
    else:
        raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
    return _packed(flat, node, np.flatnonzero(mask), samples)


def unique_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of the full prefix tree of `samples`."""
    flat = _flatten(samples)
    return int(_lexicographic(flat).max()) + 1


def _flatten(samples: Sequence[Sample]) -> _Flat:
    length = np.array([len(sample.tokens) for sample in samples], np.int64)
    start = np.cumsum(length) - length
    sample = np.repeat(np.arange(len(length)), length)
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int32)
    routes = stacked(samples)
    return _Flat(
        tokens=tokens,
        key=_keys(tokens, samples, routes),
        sample=sample,
        position=np.arange(len(sample)) - start[sample],
        start=start,
        length=length,
        routes=routes,
    )


def _keys(tokens: np.ndarray, samples: Sequence[Sample], routes: np.ndarray | None) -> np.ndarray:
    """One integer for each pair of a token and its other inputs."""
    if routes is None and all(sample.inputs is None for sample in samples):
        return tokens
    inputs = [np.zeros(len(s.tokens), np.int64) if s.inputs is None else s.inputs for s in samples]
    other = np.concatenate(inputs)
    if routes is not None:
        other = digests(np.stack([other, digests(routes)], axis=1))
    _, kind = np.unique(other, return_inverse=True)
    return kind * (np.int64(tokens.max()) + 1) + tokens


def _lexicographic(flat: _Flat) -> np.ndarray:
    """Node map i64[L] of the prefix tree with siblings in order of their key.

    In sorted order a sample shares with the samples before it exactly what it shares with
    its neighbour, so what remains of it are new nodes and they come in depth-first order.
    """
    sequences = np.split(flat.key, flat.start[1:])
    # Big-endian, so that comparing bytes compares keys.
    keys = [keys.astype(keys.dtype.newbyteorder(">")).tobytes() for keys in sequences]
    path = np.empty(flat.length.max(), np.int64)
    node = np.empty(len(flat.tokens), np.int64)
    previous, count = sequences[0][:0], 0
    for i in sorted(range(len(keys)), key=keys.__getitem__):
        size = len(sequences[i])
        shared = _common_prefix(previous, sequences[i])
        path[shared:size] = np.arange(count, count + size - shared)
        node[flat.start[i] : flat.start[i] + size] = path[:size]
        previous, count = sequences[i], count + size - shared
    return node


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _heaviest_first(flat: _Flat, node: np.ndarray) -> np.ndarray:
    """Renumbers a depth-first node map so that heavier siblings come first."""
    parent, stop = _parents(flat, node), _exits(flat, node)
    index = np.arange(len(parent))
    size = stop - index
    lowest = np.full(len(parent), len(flat.start))
    np.minimum.at(lowest, node, flat.sample)
    above = np.where(parent == index, -1, parent)  # the roots are siblings too
    rank = np.lexsort((lowest, -size, above))
    before = np.cumsum(size[rank]) - size[rank]
    group = np.r_[True, above[rank][1:] != above[rank][:-1]]
    before -= before[np.flatnonzero(group)[np.cumsum(group) - 1]]
    skipped = np.empty(len(parent), np.int64)  # tokens of the siblings that precede a node
    skipped[rank] = before
    # A node's new index is its depth plus what was skipped anywhere on its path.
    total = np.cumsum(skipped[node])
    total -= (total - skipped[node])[flat.start][flat.sample]
    return flat.position + total


def _chains(flat: _Flat, context: np.ndarray) -> np.ndarray:
    """Row i64[S] of each sample: the index of the first sample in it; see `merge`.

    `context` i64[S] is how many tokens of a sample precede its first trained one. A row
    equals a prefix of the context if the node it ends at lies on the context's path.
    """
    node = _lexicographic(flat)
    ends = node[flat.start + flat.length - 1]
    open_rows: dict[int, list[int]] = {}  # rows by the node they end at
    is_open = np.zeros(int(node.max()) + 1, bool)
    row_of = np.arange(len(flat.start))
    for i, (start, size, end) in enumerate(zip(flat.start, context, ends, strict=True)):
        path = node[start : start + size]
        found = np.flatnonzero(is_open[path])
        if len(found):
            at = int(path[found[-1]])
            row_of[i] = heapq.heappop(open_rows[at])
            is_open[at] = bool(open_rows[at])
        heapq.heappush(open_rows.setdefault(int(end), []), int(row_of[i]))
        is_open[end] = True
    return row_of


def _in_rows(flat: _Flat, row_of: np.ndarray) -> np.ndarray:
    """Node map i64[L] of isolated rows, the longest first, ties to the lowest sample."""
    longest = np.zeros(len(row_of), np.int64)
    np.maximum.at(longest, row_of, flat.length)
    order = np.argsort(-longest, kind="stable")
    start = np.empty_like(longest)
    start[order] = np.cumsum(longest[order]) - longest[order]
    return start[row_of[flat.sample]] + flat.position


def _parents(flat: _Flat, node: np.ndarray) -> np.ndarray:
    parent = np.empty(int(node.max()) + 1, np.int64)
    parent[node] = np.where(flat.position == 0, node, np.roll(node, 1))
    return parent


def _exits(flat: _Flat, node: np.ndarray) -> np.ndarray:
    """Index past each subtree: the last node of any sample that passes, plus one."""
    ends = node[flat.start + flat.length - 1]
    stop = np.zeros(int(node.max()) + 1, np.int64)
    np.maximum.at(stop, node, ends[flat.sample] + 1)
    return stop


def _packed(
    flat: _Flat, node: np.ndarray, trained: np.ndarray, samples: Sequence[Sample]
) -> PackedTree:
    """The forest of a node map, with an occurrence for each of the flat tokens `trained`."""
    temperatures = np.array([s.temperature for s in samples])
    sample = flat.sample[trained]
    greedy = np.flatnonzero(temperatures[sample] <= 0)
    if len(greedy):
        i = int(sample[greedy[0]])
        raise ValueError(f"sample {i}: temperature={samples[i].temperature} cannot be trained on")
    support = of_trained(samples)
    kinds, kind = np.unique(edge_kinds(temperatures[sample], support), return_inverse=True)
    edges, first, occurrence_edge = np.unique(
        node[trained] * len(kinds) + kind, return_index=True, return_inverse=True
    )
    parent = _parents(flat, node)
    tokens, depth = np.empty(len(parent), np.int32), np.empty(len(parent), np.int32)
    tokens[node], depth[node] = flat.tokens, flat.position
    place = np.empty(len(parent), np.int64)
    place[node] = np.arange(len(node))  # one in the samples of each token
    return PackedTree(
        tokens=tokens,
        depth=depth,
        parent=parent.astype(np.int32),
        exit=_exits(flat, node).astype(np.int32),
        edge_token=(edges // max(1, len(kinds))).astype(np.int32),
        edge_temperature=temperatures[sample[first]].astype(np.float32),
        edge_support=None if support is None else support.at(first),
        occurrence_edge=occurrence_edge.astype(np.int32),
        occurrence_sample=sample.astype(np.int32),
        old_logp=np.concatenate([s.old_logp for s in samples])[trained].astype(np.float32),
        advantage=np.concatenate([s.advantage for s in samples])[trained].astype(np.float32),
        weight=np.ones(len(trained), np.float32),
        occurrence_index=trained.astype(np.int64),
        multiplicity=np.bincount(node).astype(np.float32),
        routes=None if flat.routes is None else flat.routes[place],
        n_tokens=len(tokens),
        n_edges=len(edges),
        n_occurrences=len(trained),
    )
