"""Supports of the trained tokens of samples: joined, and told apart.

Samples go in; one support for all their trained tokens, and a key of each, come out. Equal
supports under equal temperatures have equal keys, different ones do not, but for a chance of
about 2 ** -60.
"""

from collections.abc import Sequence

import numpy as np

from forge_jax.drawing import Support, joined, nothing_of, widened
from forge_jax.sched.ladder import bucket
from forge_jax.sched.routes import digests
from forge_jax.types import Sample

SMALLEST = 8  # tokens that there is room for, in the narrowest support
GROWTH = 2  # from width to width, few of which are compiled


def of_trained(samples: Sequence[Sample]) -> Support | None:
    """Of all trained tokens, one after another; None if no sample says any."""
    if all(sample.support is None for sample in samples):
        return None
    parts = [
        nothing_of(int(sample.mask.sum()), 0)
        if sample.support is None
        else sample.support.at(sample.mask.astype(bool))
        for sample in samples
    ]
    found = joined(parts)
    return widened(found, bucket(found.ids.shape[1], SMALLEST, GROWTH, 1))


def edge_kinds(temperature: np.ndarray, support: Support | None) -> np.ndarray:
    """i64[M], equal where temperatures f64[M] and supports are."""
    _, kind = np.unique(temperature, return_inverse=True)
    if support is None:
        return kind
    words = (support.ids, support.offsets.view(np.int32), support.kind[:, None], kind[:, None])
    return digests(np.concatenate([word.astype(np.int64) for word in words], axis=1))
