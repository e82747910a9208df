"""The state of training, and the optimiser that moves it.

Parameters go in; a `TrainState` comes out, every leaf of it an array, so that one
checkpoint of one pytree resumes exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from forge_jax.config import OptimConfig
from forge_jax.trees import pytree


@pytree
class TrainState:
    """Everything that an update changes."""

    step: jax.Array  # i32[], updates so far; also the version of `params`
    params: Any
    opt_state: Any


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm, with a linear warm-up.

    Step s (from 0) of the warm-up has the rate ``learning_rate * (s + 1) / warmup_steps``.
    """

    def rate(count: jax.Array) -> jax.Array:
        return cfg.learning_rate * jnp.minimum(1.0, (count + 1) / max(1, cfg.warmup_steps))

    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(rate, b1=cfg.beta1, b2=cfg.beta2, eps=cfg.eps, weight_decay=cfg.weight_decay),
    )


def create(params: Any, cfg: OptimConfig) -> TrainState:
    """The state before the first update. It aliases `params`, which updates then consume."""
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer(cfg).init(params)
    )
