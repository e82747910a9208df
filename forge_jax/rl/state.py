"""The state of training, and the optimiser that moves it.

Parameters go in; a `TrainState` comes out, every leaf of it an array, so that one
checkpoint of one pytree resumes exactly.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forge_jax.config import OptimConfig
from forge_jax.sharding import put, replicated
from forge_jax.trees import pytree


@pytree
class TrainState:
    """Everything that an update changes."""

    step: jax.Array  # i32[], updates so far; also the version of `params`
    params: Any
    opt_state: Any


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) on gradients clipped by their global norm, its rate scheduled.

    Prediction modules are clipped by a norm of their own, so that they do not move the policy.

    Step s (from 0) of the warm-up has the rate ``learning_rate * (s + 1) / warmup_steps``;
    from its end the rate falls in a straight line, to ``final_share`` of it at
    ``decay_steps`` and after.
    """
    return optax.chain(
        optax.stateless(lambda grads, _: clipped(grads, cfg.clip_norm)),
        optax.adamw(
            partial(rate, cfg=cfg),
            b1=cfg.beta1,
            b2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            mask=trained,
        ),
    )


def trained(params: Any) -> Any:
    """False for the routers' biases: these have no gradient and must not decay either."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1] != jax.tree_util.DictKey("router_bias"), params
    )


def clipped(grads: dict[str, Any], limit: float) -> dict[str, Any]:
    """`grads` with a global norm of at most `limit`, and their prediction modules' with another."""
    clip = optax.clip_by_global_norm(limit).update
    parts = [policy_of(grads)]
    if "mtp" in grads:
        parts.append({"mtp": grads["mtp"]})
    return {name: g for part in parts for name, g in clip(part, optax.EmptyState())[0].items()}


def policy_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Parameters or gradients without the prediction modules."""
    return {name: leaf for name, leaf in tree.items() if name != "mtp"}


def rate(count: jax.Array, cfg: OptimConfig) -> jax.Array:
    """Learning rate of update `count`, from 0: see `optimizer`."""
    warm = jnp.minimum(1.0, (count + 1) / max(1, cfg.warmup_steps))
    if not cfg.decay_steps:
        return cfg.learning_rate * warm
    fallen = (count - cfg.warmup_steps) / max(1, cfg.decay_steps - cfg.warmup_steps)
    share = 1 - (1 - cfg.final_share) * jnp.clip(fallen, 0.0, 1.0)
    return cfg.learning_rate * warm * share


def create(params: Any, cfg: OptimConfig) -> TrainState:
    """The state before the first update, on the devices of `params`.

    It aliases `params`, which updates then consume. Moments are cut as their parameters are;
    counters are whole on every device.
    """
    everywhere = replicated(jax.tree.leaves(params)[0].sharding)
    made = optimizer(cfg)
    return TrainState(
        step=put(jnp.zeros((), jnp.int32), everywhere),
        params=params,
        # Moments are made like their parameters, and so in the same parts.
        opt_state=optax.tree.map_params(
            made,
            lambda moment: moment,
            made.init(params),
            transform_non_params=lambda counter: put(counter, everywhere),
        ),
    )
