"""A mixture of experts in place of a feed-forward layer: route, sort, compute, combine.

Hidden states flow in; outputs of the same shape flow out, and how the tokens were routed.
No token is dropped: what one token gets does not depend on the tokens beside it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.collectives import Cut, enter, leave, shared_sum, whole
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import accumulator
from forge_jax.trees import pytree


@pytree
class Routing:
    """How tokens were routed. Sums are over tokens, each as often as its multiplicity."""

    experts: Array  # i32[..., T, k], of each token, in no order
    load: Array  # f32[X], tokens that chose each expert
    score: Array  # f32[X], the router's scores, which sum to 1 for a token


def feed_forward(
    x: Float[Array, "... T E"],
    layer: Mapping[str, Array],
    cfg: ModelConfig,
    cut: Cut,
    routes: Int[Array, "... T k"] | None = None,
    multiplicity: Float[Array, "... T"] | None = None,
) -> tuple[Float[Array, "... T E"], Routing]:
    """The weighted sum of each token's experts.

    `routes` are the experts to use, whatever the router would choose; a negative one leaves
    the token's choice to the router. The weights always are the router's.
    """
    flat = x.reshape(-1, x.shape[-1])
    given = None if routes is None else routes.reshape(-1, routes.shape[-1])
    often = jnp.ones(len(flat)) if multiplicity is None else multiplicity.reshape(-1)
    score, experts, weight = route(flat, layer, cfg, given)
    y = _experts(enter(flat, cut.tensor), experts, enter(weight, cut.tensor), layer, cfg, cut)
    y = leave(y, cut.tensor)
    chosen = jnp.sum(jax.nn.one_hot(experts, cfg.experts, dtype=jnp.float32), axis=1)
    share = score / jnp.sum(score, axis=-1, keepdims=True)
    routing = Routing(
        experts=experts.reshape(*x.shape[:-1], -1),
        load=jnp.einsum("t,tx->x", often, chosen),
        score=jnp.einsum("t,tx->x", often, share.astype(jnp.float32)),
    )
    return y.reshape(x.shape), routing


def route(
    x: Float[Array, "T E"],
    layer: Mapping[str, Array],
    cfg: ModelConfig,
    routes: Int[Array, "T k"] | None,
) -> tuple[Float[Array, "T X"], Int[Array, "T k"], Float[Array, "T k"]]:
    """Scores of all experts, each token's experts, and the weights of these, in fp32 or wider."""
    wide = accumulator(x)
    z = jnp.matmul(
        x.astype(wide), layer["router"].astype(wide), precision=jax.lax.Precision.HIGHEST
    )
    score = jax.nn.softmax(z, axis=-1) if cfg.router == "softmax" else jax.nn.sigmoid(z)
    merit = jax.lax.stop_gradient(score)
    if cfg.router_bias:
        merit = merit + layer["router_bias"].astype(wide)[None]
    experts = jax.lax.top_k(merit, cfg.experts_per_token)[1]
    if routes is not None:
        experts = jnp.where(routes >= 0, routes, experts)
    weight = jnp.take_along_axis(score, experts, axis=-1)
    if cfg.norm_top:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return score, experts, weight


def _experts(
    x: Float[Array, "T E"],
    experts: Int[Array, "T k"],
    weight: Float[Array, "T k"],
    layer: Mapping[str, Array],
    cfg: ModelConfig,
    cut: Cut,
) -> Float[Array, "T E"]:
    """This rank's experts on the tokens of all ranks; each rank keeps the sum for its own."""
    x, weight = whole(x, cut.expert), whole(weight, cut.expert)
    experts = jax.lax.all_gather(experts, cut.expert, tiled=True) if cut.expert else experts
    local = layer["gate"].shape[0]
    first = jax.lax.axis_index(cut.expert) * local if cut.expert else 0
    here = experts.reshape(-1) - first
    here = jnp.where((here >= 0) & (here < local), here, local)  # those elsewhere come last
    order = jnp.argsort(here, stable=True)
    sizes = jnp.bincount(here, length=local + 1)[:local].astype(jnp.int32)
    token = order // cfg.experts_per_token
    rows = x[token]
    gated = jax.nn.silu(jax.lax.ragged_dot(rows, layer["gate"], sizes))
    gated = gated * jax.lax.ragged_dot(rows, layer["up"], sizes)
    out = jax.lax.ragged_dot(gated, layer["down"], sizes)
    scale = jnp.where(here < local, weight.reshape(-1), 0)[order]
    out = out * scale.astype(out.dtype)[:, None]
    return shared_sum(jnp.zeros_like(x).at[token].add(out), cut.expert)
