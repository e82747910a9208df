"""What updates cost: the prior of a model, and what steps add to it.

A model's sizes and the seconds of whole steps flow in; the cost model that the next step is
packed by flows out. Nothing here waits for a device.
"""

from collections.abc import Sequence

import jax
import numpy as np

from forge_jax.models.config import ModelConfig
from forge_jax.rl.step import Updated
from forge_jax.sched.cost import CostModel, Fit, analytic, sizes_of
from forge_jax.sched.split import forest_of
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


def trusted(fit: Fit, model: ModelConfig, repeats: bool) -> CostModel:
    """What a step is packed by: the fit. A run that `repeats` to the bit, and several hosts that
    must pack alike, have the prior, since no two clocks agree."""
    return prior(model) if repeats or jax.process_count() > 1 else fit.model()


def observe(fit: Fit, trees: Sequence[MicroBatch], done: Updated, tile: int) -> None:
    """Tells `fit` what a step took, unless nothing was trained. Of a carried tree what is
    computed twice is left out."""
    if not done.stepped:
        return
    sizes = np.array([sizes_of(forest_of(tree), tile) for tree in trees])
    sizes[:, 0] = [len(tree.start) if isinstance(tree, CarriedTree) else 1 for tree in trees]
    fit.observe(sizes.sum(axis=0), done.seconds)
