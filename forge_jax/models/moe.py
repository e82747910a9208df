"""A mixture of experts in place of a feed-forward layer: route, compute, combine.

Hidden states flow in; outputs of the same shape flow out, and how the tokens were routed.
No token is dropped: what one token gets does not depend on the tokens beside it.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from forge_jax.collectives import Cut, enter, leave, shared_sum, whole
from forge_jax.models.config import ModelConfig
from forge_jax.models.experts import Experts, mixture
from forge_jax.models.layers import accumulator
from forge_jax.sharding import WORK
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
    implementation: str = "auto",
) -> tuple[Float[Array, "... T E"], Routing]:
    """The weighted sum of each token's experts.

    `routes` are the experts to use, whatever the router would choose; a negative one leaves
    the token's choice to the router. The weights always are the router's. `implementation` is
    that of `forge_jax.models.experts.mixture`.
    """
    flat = x.reshape(-1, x.shape[-1])
    given = None if routes is None else routes.reshape(-1, routes.shape[-1])
    often = jnp.ones(len(flat)) if multiplicity is None else multiplicity.reshape(-1)
    score, experts, weight = route(flat, layer, cfg, given)
    if cut.spread is not None:
        y = _spread(flat, experts, weight, layer, cut.spread, implementation)
    else:
        x_in, weight = enter(flat, cut.tensor), enter(weight, cut.tensor)
        y = leave(_experts(x_in, experts, weight, layer, cut, implementation), cut.tensor)
    # A comparison that is reduced as it is made, where a scatter would go one by one.
    chose = experts[..., None] == jnp.arange(cfg.experts)[None, None]
    share = score / jnp.sum(score, axis=-1, keepdims=True)
    routing = Routing(
        experts=experts.reshape(*x.shape[:-1], -1),
        load=jnp.sum(jnp.where(chose, often[:, None, None], 0), axis=(0, 1)),
        score=jnp.sum(often[:, None] * share, axis=0),
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
    cut: Cut,
    implementation: str,
) -> Float[Array, "T E"]:
    """This rank's experts on the tokens of all ranks; each rank keeps the sum for its own."""
    x, weight = whole(x, cut.expert), whole(weight, cut.expert)
    local = Experts(layer["gate"], layer["up"], layer["down"])
    if cut.expert:
        experts = jax.lax.all_gather(experts, cut.expert, tiled=True)
        experts = experts - jax.lax.axis_index(cut.expert) * len(local.gate)
    y = mixture(x, experts, weight, local, implementation=implementation)
    return shared_sum(y, cut.expert)


def _spread(
    x: Float[Array, "T E"],
    experts: Int[Array, "T k"],
    weight: Float[Array, "T k"],
    layer: Mapping[str, Array],
    mesh: Mesh,
    implementation: str,
) -> Float[Array, "T E"]:
    """Every rank of `mesh` has its experts, and its share of their hidden units, go over the
    tokens of those that hold others: tokens travel, experts do not."""
    number, _, units = layer["gate"].shape
    expert = "expert" if number % mesh.shape["expert"] == 0 else None
    tensor = "tensor" if units % mesh.shape["tensor"] == 0 else None
    sums = tuple(axis for axis in (expert, tensor) if axis)
    apart = tuple(axis for axis in WORK if axis != "expert")
    tokens = jax.P(apart if len(x) % math.prod(mesh.shape[axis] for axis in apart) == 0 else None)

    def rank(x: Array, experts: Array, weight: Array, *local: Array) -> Array:
        if expert:
            experts = experts - jax.lax.axis_index(expert) * len(local[0])
        y = mixture(x, experts, weight, Experts(*local), implementation=implementation)
        return leave(y, sums)

    up, down = jax.P(expert, None, tensor), jax.P(expert, tensor)
    specs = (tokens, tokens, tokens, up, up, down)
    mapped = jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(x, experts, weight, layer["gate"], layer["up"], layer["down"])
