"""The decoder-only transformer, as pure functions of its parameters.

Tokens and positions flow in, hidden states and logits flow out. Attention is an
argument, so that one model serves tree training, prefill, decoding and tests; the
model itself knows of order only through `positions`, never through an index. So are how a
layer's weights are made ready and over which mesh axes they are cut.

Sources: Qwen3 technical report, arXiv 2505.09388 (grouped queries, RMS norm on every query
and key head, rotary embedding with split halves, SwiGLU, no biases); the other families
differ by what their `ModelConfig` says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from forge_jax.collectives import UNCUT, Cut, enter, leave
from forge_jax.models import moe
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import accumulator, linear, rms_norm, rotate, rotation
from forge_jax.models.remat import named, remembering
from forge_jax.sharding import cuts
from forge_jax.trees import Param

# (q[..., T, H, D], k[..., T, K, D], v[..., T, K, D], layer cache) -> (o[..., T, H, D], layer cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """How stored weights become those that are computed with, here: as they are."""

    cut: Cut = UNCUT  # how they are cut over ranks then
    layer: Callable[[Any], Any] = lambda weights: weights  # those of one layer
    top: Callable[[str, Array], Array] = lambda name, weight: weight  # one outside the layers
    module: Callable[[Any], Any] = lambda weights: weights  # those of one of `models.mtp`
    lent: bool = False  # no layer's weights are kept from its forward to its backward pass


AS_STORED = Ready()


def hidden(
    params: dict[str, Any],
    tokens: Int[Array, "... T"],
    positions: Int[Array, "... T"],
    attend: Attend,
    cfg: ModelConfig,
    cache: Any = None,
    *,
    remat: str = "none",
    ready: Ready = AS_STORED,
    routes: Int[Array, "layers ... T k"] | None = None,
    multiplicity: Float[Array, "... T"] | None = None,
) -> tuple[Float[Array, "... T E"], Any, moe.Routing | None]:
    """Final-normed hidden states in the dtype of the parameters, the new cache, and, where there
    are experts, how tokens were routed, with a leading layer axis.

    `cache` has a leading layer axis where layers are stacked and is a tuple where they
    are; each layer's part goes through `attend`. `remat` names what layers keep for the backward
    pass, see `forge_jax.models.remat`. `routes` are experts to use, -1 where the
    router is to choose; `multiplicity` is how often each token counts in the sums of the routing.
    Raises ValueError on an unknown `remat`.
    """
    h = embedded(params, tokens, cfg, ready)
    turned = rotation(positions, cfg, accumulator(h))
    stacked = isinstance(params["layers"], dict)
    if not stacked:  # or the compiler computes the angles again in every layer, for every head
        turned = jax.lax.optimization_barrier(turned)

    def layer(h: Array, weights: Any, cache: Any, routes: Any) -> tuple[Array, tuple[Any, Any]]:
        h, weights = named(h, "stream"), ready.layer(weights)
        return block(h, weights, cache, turned, attend, cfg, ready.cut, routes, multiplicity)

    layer = remembering(layer, remat, ready.lent, stacked)
    if stacked:
        over = (params["layers"], cache, routes)
        h, (cache, routing) = jax.lax.scan(lambda h, x: layer(h, *x), h, over)
    else:
        h, cache, routing = _unrolled(layer, h, params["layers"], cache, routes)
    return rms_norm(h, ready.top("norm", params["norm"]), cfg.norm_eps), cache, routing


def _unrolled(
    layer: Callable[..., Any], h: Array, layers: tuple[Any, ...], cache: Any, routes: Any
) -> tuple[Array, Any, Any]:
    after = []
    for i, weights in enumerate(layers):
        before = None if cache is None else cache[i]
        h, new = layer(h, weights, before, None if routes is None else routes[i])
        after.append(new)
    caches, routings = zip(*after, strict=True)
    routing = None if routings[0] is None else jax.tree.map(lambda *x: jnp.stack(x), *routings)
    return h, None if cache is None else caches, routing


def embedded(
    params: dict[str, Any], tokens: Int[Array, "... T"], cfg: ModelConfig, ready: Ready = AS_STORED
) -> Float[Array, "... T E"]:
    """Rows of the embedding, whose words may be cut over the tensor axes."""
    table = ready.top("embed", params["embed"])
    if ready.cut.spread is not None:  # or the compiler gathers the table for cut tokens
        everywhere = NamedSharding(ready.cut.spread, jax.P())
        tokens = jax.lax.with_sharding_constraint(tokens, everywhere)
    words = table.shape[0]
    if words == cfg.vocab:
        return table[tokens]
    place = tokens - jax.lax.axis_index(ready.cut.tensor) * words
    here = (place >= 0) & (place < words)
    rows = jnp.where(here[..., None], table[jnp.where(here, place, 0)], 0)
    return leave(rows, ready.cut.tensor)


def unembedding(
    params: dict[str, Any], cfg: ModelConfig, ready: Ready = AS_STORED
) -> Float[Array, "E V"]:
    """The output matrix, whether it is tied to the embedding or not."""
    if cfg.tied:
        return ready.top("embed", params["embed"]).T
    return ready.top("unembed", params["unembed"])


def logits(
    params: dict[str, Any], h: Float[Array, "... E"], cfg: ModelConfig
) -> Float[Array, "... V"]:
    """Next-token logits: products and sums in fp32, in fp64 where the parameters are fp64."""
    return jnp.einsum(
        "...e,ev->...v",
        h,
        unembedding(params, cfg),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulator(h),
    )


def block(
    h: Float[Array, "... T E"],
    layer: dict[str, Array],
    cache: Any,
    turned: Float[Array, "2 ... T 1 R"],
    attend: Attend,
    cfg: ModelConfig,
    cut: Cut = UNCUT,
    routes: Int[Array, "... T k"] | None = None,
    multiplicity: Float[Array, "... T"] | None = None,
) -> tuple[Float[Array, "... T E"], tuple[Any, moe.Routing | None]]:
    """One layer: the residual stream after it, its new cache, and how it routed."""
    h = _beside_weights(h, cut)
    with jax.named_scope("attention"):
        x = enter(rms_norm(h, layer["input_norm"], cfg.norm_eps), cut.tensor)
        q, k, v = (linear(x, layer[name]) for name in ("q", "k", "v"))
        q, k = (rotate(_qk_norm(y, layer, n, cfg, cut), turned) for y, n in ((q, "q"), (k, "k")))
        q, k, v = (named(x, "attention") for x in (q, k, v))
        o, cache = attend(q, k, v, cache)
        h = _beside_weights(h + leave(linear(o, layer["o"], inputs=2), cut.tensor), cut)
    with jax.named_scope("feed_forward"):
        x = rms_norm(h, layer["post_norm"], cfg.norm_eps)
        if cfg.experts:
            y, routing = moe.feed_forward(x, layer, cfg, cut, routes, multiplicity)
            return h + y, (cache, routing)
        x = enter(x, cut.tensor)
        gated = jax.nn.silu(linear(x, layer["gate"])) * linear(x, layer["up"])
        return h + leave(linear(gated, layer["down"]), cut.tensor), (cache, None)


def _beside_weights(h: Float[Array, "... T E"], cut: Cut) -> Array:
    """The residual stream cut as the sides of weights that it meets are, where the compiler
    cuts what is computed: it then sums products over ranks and gathers no weight."""
    if cut.spread is None:
        return h
    [axes] = cuts(Param(h.shape[-1:], ("embed",), 0.0), cut.spread)
    rows = tuple(axis for axis in cut.rows if axis not in axes)
    if not axes and not rows:
        return h
    free = jax.P.UNCONSTRAINED
    tokens = (rows or free, *(free,) * (h.ndim - 2))
    where = NamedSharding(cut.spread, jax.P(*tokens, axes or None))
    return jax.lax.with_sharding_constraint(h, where)


def _qk_norm(
    x: Float[Array, "... H D"], layer: dict[str, Array], name: str, cfg: ModelConfig, cut: Cut
) -> Float[Array, "... H D"]:
    """Queries or keys normed: each head by itself, or all heads of the layer together."""
    if cfg.qk_norm == "none":
        return x
    scale = layer[f"{name}_norm"]
    if cfg.qk_norm == "head":
        return rms_norm(x, enter(scale, cut.tensor), cfg.norm_eps)
    wide = x.astype(accumulator(x))
    total = jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)
    total = enter(leave(total, cut.tensor), cut.tensor)  # every rank's heads depend on it
    size = (cfg.heads if name == "q" else cfg.kv_heads) * cfg.head_dim
    wide = wide * jax.lax.rsqrt(total / size + cfg.norm_eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 2)))
