"""What updates cost: the prior of a model, and what steps add to it.

A model's sizes and the seconds of whole steps flow in; the cost model that the next step is
packed by flows out. Nothing here waits for a device.
"""

from collections.abc import Sequence

import numpy as np

from forge_jax.models.config import ModelConfig
from forge_jax.rl.step import Updated
from forge_jax.sched.cost import CostModel, Fit, analytic, sizes_of
from forge_jax.types import CarriedTree, MicroBatch


def prior(model: ModelConfig) -> CostModel:
    """The model's operations, before anything is measured."""
    return analytic(
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
    )


def observe(fit: Fit, trees: Sequence[MicroBatch], done: Updated, tile: int) -> None:
    """Tells `fit` what a step took, unless nothing was trained or a tree was carried, which
    does some of its work twice."""
    packed = [tree for tree in trees if not isinstance(tree, CarriedTree)]
    if done.stepped and len(packed) == len(trees):
        sizes = np.sum([sizes_of(tree, tile) for tree in packed], axis=0)
        fit.observe(sizes, done.seconds)
