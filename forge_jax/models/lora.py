"""Low-rank adapters (arXiv 2106.09685): a frozen base, and beside it a small pytree to train.

A model's sizes and a `LoraConfig` flow in; the adapters' description and fresh values, and the
weights that base and adapters make together, flow out. The matrix W of a layer becomes
``W + alpha / rank * A B``: computed as ``x W + alpha / rank (x A) B``, whose gradients are of A and
B alone, or merged into one matrix.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from forge_jax.config import LoraConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import Adapted, accumulator
from forge_jax.models.layout import block_layout, layout
from forge_jax.trees import Param, pytree

INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}  # axes contracted
EXPERTS = ("gate", "up", "down")


@pytree
class Tuned:
    """A model of which the adapters alone are trained."""

    base: Any  # its parameters
    adapters: Any


def adapters_layout(cfg: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """Every adapter, layers stacked: a [layers, in..., rank] is normal, b [layers, rank, out...] 0.

    Axes are those of the weight; the rank is not cut. Raises UserError for experts.
    """
    if cfg.experts and set(lora.targets) & set(EXPERTS):
        raise UserError(
            f"lora.targets={','.join(lora.targets)}: experts are not adapted; "
            "of a model with experts take q,k,v,o"
        )
    weights = block_layout(cfg, cfg.layers)

    def pair(name: str) -> dict[str, Param]:
        (layers, *sizes), (axis, *axes), _, _ = weights[name]
        at = INPUTS[name]
        std = math.prod(sizes[:at]) ** -0.5
        return {
            "a": Param((layers, *sizes[:at], lora.rank), (axis, *axes[:at], None), std),
            "b": Param((layers, lora.rank, *sizes[at:]), (axis, None, *axes[at:]), 0.0, 0.0),
        }

    return {"layers": {name: pair(name) for name in lora.targets}}


def described(cfg: ModelConfig, lora: LoraConfig) -> Any:
    """Every parameter that is computed with, in the places of `tuned`."""
    whole = layout(cfg)
    return tuned(whole, adapters_layout(cfg, lora)) if lora.rank else whole


def tuned(base: Any, trained: Any) -> Any:
    """What to compute with: `trained` parameters, or adapters beside a `base` unless it is None."""
    return trained if base is None else Tuned(base=base, adapters=trained)


def trained_of(params: Any) -> Any:
    """What of `params` is trained: all of a model, or its adapters."""
    return params.adapters if isinstance(params, Tuned) else params


def with_trained(params: Any, trained: Any) -> Any:
    """`params` with other values of what is trained."""
    return Tuned(base=params.base, adapters=trained) if isinstance(params, Tuned) else trained


def adapt(params: Any, lora: LoraConfig) -> dict[str, Any]:
    """Parameters to compute with: where there are adapters, beside the frozen weight."""
    if not isinstance(params, Tuned):
        return params
    base = params.base["layers"]
    beside = {
        name: Adapted(weight=base[name], **pair, scale=lora.scale)
        for name, pair in params.adapters["layers"].items()
    }
    return {**params.base, "layers": base | beside}


def merge(params: Any, lora: LoraConfig) -> dict[str, Any]:
    """Parameters in which adapters and weights are one, each in the dtype of the base.

    Products and sums are in at least float32. What has no adapter is the base's own array.
    """
    if not isinstance(params, Tuned):
        return params
    base = params.base["layers"]
    pairs = params.adapters["layers"]
    merged = _merged({name: base[name] for name in pairs}, pairs, lora.scale)
    return {**params.base, "layers": base | merged}


@jax.jit
def _merged(weights: dict[str, Array], pairs: Any, scale: float) -> dict[str, Array]:
    return {name: _sum(weight, **pairs[name], scale=scale) for name, weight in weights.items()}


def _sum(weight: Array, a: Array, b: Array, scale: Any) -> Array:
    wide = accumulator(weight)
    delta = jax.lax.dot_general(
        a.astype(wide),
        b.astype(wide),
        (((a.ndim - 1,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
    )
    return (weight.astype(wide) + jnp.asarray(scale, wide) * delta).astype(weight.dtype)
