"""What the loss of a batch is a mean over: tokens, samples, episodes or groups.

Micro-batches and their samples go in; the micro-batches come out, every occurrence with its
weight in the mean. Weights follow from the samples alone, before anything is cut: with E units
(episodes, say) that train tokens, N trained tokens in all and n_e of unit e, an occurrence of e
weighs ``N / (E n_e)``, and the sum over the batch divided by N is the mean over units of the mean
over each one's tokens. However an episode is cut into samples, its weights are the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.dtypes import canonicalize_dtype

from forge_jax.config import LossConfig
from forge_jax.types import CarriedTree, MicroBatch, PackedTree, Sample


def averaged(
    parts: Sequence[MicroBatch], samples: Sequence[Sample], cfg: LossConfig
) -> list[MicroBatch]:
    """`parts`, made of `samples`, weighted for the mean that `cfg.per` asks for."""
    if cfg.per == "token" or not samples:
        return list(parts)
    weights = sample_weights(samples, cfg)

    def weighted(tree: PackedTree) -> PackedTree:
        weight = np.where(tree.weight > 0, weights[tree.occurrence_sample], 0)
        return replace(tree, weight=weight.astype(canonicalize_dtype(weight.dtype)))

    return [
        replace(part, tree=weighted(part.tree)) if isinstance(part, CarriedTree) else weighted(part)
        for part in parts
    ]


def sample_weights(samples: Sequence[Sample], cfg: LossConfig) -> np.ndarray:
    """Weight f64[S] of each trained token of a sample; with per=token all are 1."""
    trained = np.array([np.count_nonzero(sample.mask) for sample in samples])
    units = {
        "token": [0 for _ in samples],
        "sample": range(len(samples)),
        "episode": [(sample.group, sample.episode) for sample in samples],
        "group": [sample.group for sample in samples],
        "constant": [(sample.group, sample.episode) for sample in samples],
    }[cfg.per]
    number = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    unit = np.array([number[one] for one in units])
    tokens = np.bincount(unit, weights=trained)
    size = np.full(len(tokens), cfg.constant) if cfg.constant is not None else tokens
    return trained.sum() / np.maximum(1, np.count_nonzero(tokens) * size)[unit]
