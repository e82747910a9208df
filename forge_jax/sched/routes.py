"""Routes of samples: which experts each token is to use, in every layer.

Samples go in; their routes one after another, and a key for each token's, come out. Equal
routes have equal keys, different ones do not, but for a chance of about 2 ** -60.
"""

import math
from collections.abc import Sequence

import numpy as np

from forge_jax.types import NO_ROUTE, Sample


def stacked(samples: Sequence[Sample]) -> np.ndarray | None:
    """int[L, layers, k] of all samples, `NO_ROUTE` where one has none; None if none has any.

    Raises ValueError where the routes of two samples are not alike.
    """
    kinds = {(s.routes.dtype, s.routes.shape[1:]) for s in samples if s.routes is not None}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"routes of different kinds: {sorted(map(str, kinds))}")
    [(dtype, shape)] = kinds
    return np.concatenate([
        np.full((len(s.tokens), *shape), NO_ROUTE, dtype) if s.routes is None else s.routes
        for s in samples
    ])  # fmt: skip


def digests(rows: np.ndarray) -> np.ndarray:
    """i64[L], a key of each of the integer arrays rows[i].

    The sum of the elements, each times an odd number of its own, modulo 2 ** 64 (Carter and
    Wegman's universal hashing, 1979): rows that differ in one element never share a key.
    """
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    factors = np.random.default_rng(0).integers(0, 2**63, flat.shape[1], np.uint64) * 2 + 1
    total = np.zeros(len(rows), np.uint64)
    for column, factor in zip(flat.T, factors.astype(np.uint64), strict=True):
        total += column.astype(np.int64).view(np.uint64) * factor
    return total.view(np.int64)
