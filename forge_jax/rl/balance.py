"""Experts kept busy alike: a bias that follows their load, or a loss; and what is measured.

Loads of experts flow in, every token counted as often as it occurs in samples; a change of the
routers' biases, a term of the loss or metrics flow out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from forge_jax.config import MoeConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.moe import Routing


def check_model(cfg: MoeConfig, model: ModelConfig) -> None:
    """Raises UserError where a model cannot be balanced as asked."""
    if cfg.balance != "none" and not model.experts:
        raise UserError(f"moe.balance={cfg.balance}: the model has no experts")
    if cfg.balance == "bias" and not model.router_bias:
        raise UserError(
            "moe.balance=bias: the model's routers have no bias; moe.balance=aux needs none"
        )


def shift(
    params: dict[str, Any], load: Float[Array, "layers X"] | None, rate: float
) -> dict[str, Any]:
    """`params` with the biases of their layers' routers shifted by what one update showed."""
    assert load is not None, "the model has no experts"
    layers = params["layers"]
    bias = layers["router_bias"]
    bias = jax.device_put(shifted(bias, load, rate), bias.sharding)
    return {**params, "layers": {**layers, "router_bias": bias}}


@jax.jit
def shifted(
    bias: Float[Array, "layers X"], load: Float[Array, "layers X"], rate: Float[Array, ""]
) -> Float[Array, "layers X"]:
    """``bias + rate * sign(mean load - load)``: experts with more tokens than others are chosen
    less from the next update on (auxiliary-loss-free balancing, arXiv 2408.15664, algorithm 1).
    """
    error = jnp.mean(load, axis=-1, keepdims=True) - load
    return bias + (rate * jnp.sign(error)).astype(bias.dtype)


def share_of_loss(
    routing: Routing,
    weight: Float[Array, " M"],
    denominator: Float[Array, ""],
    rate: float,
    axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """A micro-batch's part of the loss ``rate * X * Σ_e f_e P_e``, summed over layers.

    f_e is the share of the micro-batch's choices that fell on expert e, without a gradient, P_e
    the mean of its scores (Switch transformer, arXiv 2101.03961, equations 4 to 6): a uniform
    router has `rate` a layer. A micro-batch counts by its part of the trained occurrences, the
    sum of `weight` over the step's `denominator`. `axes` are of the enclosing `shard_map` over
    which the tokens of a micro-batch are cut.
    """

    def whole(x: Array) -> Array:
        x = jax.lax.stop_gradient(x)
        return jax.lax.psum(x, axes) if axes else x

    load, tokens = whole(routing.load), whole(jnp.sum(routing.score, axis=-1, keepdims=True))
    share = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1)
    mean = routing.score / jnp.maximum(tokens, 1)
    part = whole(jnp.sum(weight)) / denominator
    return rate * part * load.shape[-1] * jnp.sum(share * mean)


def measures(load: Any) -> dict[str, float]:
    """Of f32[layers, X], means over layers: the largest load over the mean one, the share of
    experts without a token, and the entropy of the shares over that of even ones."""
    load = np.asarray(load, np.float64)
    share = load / load.sum(axis=-1, keepdims=True)
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-300)), axis=-1)
    return {
        "expert_load_max": float(np.mean(share.max(axis=-1) * load.shape[-1])),
        "expert_load_entropy": float(np.mean(entropy / np.log(load.shape[-1]))),
        "experts_idle": float(np.mean(load == 0)),
    }
