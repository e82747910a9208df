"""Every parameter of a model, described once, and fresh values for them.

A `ModelConfig` flows in; a nested dict of `Param`, or of arrays in the same places, comes
out. Shapes, shardings and checkpoint names follow from the description.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from forge_jax.models.config import ModelConfig
from forge_jax.trees import Param, is_param

DRAWN_AT_ONCE = 2**26  # values; of larger models each layer's parameters are drawn by themselves
# Scores of experts are computed in at least float32, from weights that are never rounded.
UNROUNDED = ("router", "router_bias")
Side = tuple[int, str | None]  # size and logical axis of one dimension


def layout(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model; layers are stacked on a leading axis."""
    e = cfg.embed
    top = {
        "embed": Param((cfg.vocab, e), ("vocab", "embed"), cfg.init_std),
        "layers": block_layout(cfg, cfg.layers),
        "norm": Param((e,), (None,), 0.0),
    }
    if not cfg.tied:
        top["unembed"] = Param((e, cfg.vocab), ("embed", "vocab"), cfg.init_std)
    if cfg.mtp:
        top["mtp"] = modules_layout(cfg)
    return top


def modules_layout(cfg: ModelConfig) -> dict[str, Any]:
    """The parameters of the multi-token prediction modules, stacked; see `models.mtp`."""
    e, depth = cfg.embed, cfg.mtp
    scale = Param((depth, e), ("layers", None), 0.0)
    return {
        "token_norm": scale,
        "state_norm": scale,
        "project": Param((depth, 2 * e, e), ("layers", "embed", None), cfg.init_std),
        "block": block_layout(cfg, depth),
        "norm": scale,
    }


def block_layout(cfg: ModelConfig, layers: int) -> dict[str, Param]:
    """The parameters of `layers` stacked transformer blocks."""
    e, h, k, d = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim

    def stacked(std: float, *sides: Side) -> Param:
        sizes, axes = zip((layers, "layers"), *sides, strict=True)
        return Param(sizes, axes, std)

    weight = functools.partial(stacked, cfg.init_std)
    scale = functools.partial(stacked, 0.0)
    block = {
        "input_norm": scale((e, None)),
        "q": weight((e, "embed"), (h, "heads"), (d, None)),
        "k": weight((e, "embed"), (k, "kv_heads"), (d, None)),
        "v": weight((e, "embed"), (k, "kv_heads"), (d, None)),
        "o": weight((h, "heads"), (d, None), (e, "embed")),
        "post_norm": scale((e, None)),
    }
    if cfg.qk_norm == "head":
        block |= {"q_norm": scale((d, None)), "k_norm": scale((d, None))}
    elif cfg.qk_norm == "layer":
        block["q_norm"] = scale((h, "heads"), (d, None))
        block["k_norm"] = scale((k, "kv_heads"), (d, None))
    return block | _feed_forward(cfg, weight, scale)


def _feed_forward(cfg: ModelConfig, weight: Any, scale: Any) -> dict[str, Param]:
    e, f, x = (cfg.embed, "embed"), (cfg.ffn, "ffn"), (cfg.experts, "experts")
    if not cfg.experts:
        return {"gate": weight(e, f), "up": weight(e, f), "down": weight(f, e)}
    # The axis of `embed` beside experts has a name of its own: experts are cut already.
    wide = (cfg.embed, "expert_embed")
    routed = {
        "router": weight((cfg.embed, None), (cfg.experts, None)),
        "gate": weight(x, wide, f),
        "up": weight(x, wide, f),
        "down": weight(x, f, wide),
    }
    if cfg.router_bias:
        routed["router_bias"] = scale((cfg.experts, None))._replace(fill=0.0)
    return routed


def init(
    cfg: ModelConfig, key: jax.Array, dtype: Any = jnp.float32, where: Any = None
) -> dict[str, Any]:
    """Fresh parameters: normal weights, unit norm scales.

    Values are drawn in fp32 and cast, so that every dtype starts from the same model; so does
    every mesh. `where` has a sharding for every parameter: each device draws its own part.
    """
    if where is None:
        return _init(cfg, key, dtype)
    return jax.jit(_init, static_argnums=(0, 2), out_shardings=where)(cfg, key, dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _init(cfg: ModelConfig, key: jax.Array, dtype: Any) -> dict[str, Any]:
    return draw(layout(cfg), key, dtype)


def draw(described: Any, key: jax.Array, dtype: Any) -> Any:
    """Fresh values of every `Param` in `described`."""
    leaves, tree = jax.tree.flatten(described, is_leaf=is_param)
    sizes = [math.prod(p.shape) if p.std else 0 for p in leaves]
    if sum(sizes) > DRAWN_AT_ONCE:
        alone = [_drawn(p, jax.random.fold_in(key, i), dtype) for i, p in enumerate(leaves)]
        return jax.tree.unflatten(tree, alone)
    # One draw for all: compiling a generator for each shape takes longer than drawing.
    normal = jax.random.normal(key, (sum(sizes),), jnp.float32)
    ends = list(itertools.accumulate(sizes))

    def take(p: Param, end: int, size: int) -> Array:
        if p.std == 0:
            return jnp.full(p.shape, p.fill, dtype)
        return (normal[end - size : end].reshape(p.shape) * jnp.float32(p.std)).astype(dtype)

    return jax.tree.unflatten(tree, map(take, leaves, ends, sizes))


def _drawn(p: Param, key: jax.Array, dtype: Any) -> Array:
    """One parameter, a layer at a time: what a draw needs beside its result is a layer's."""
    if p.std == 0:
        return jnp.full(p.shape, p.fill, dtype)

    def one(key: jax.Array, shape: tuple[int, ...]) -> Array:
        return (jax.random.normal(key, shape, jnp.float32) * jnp.float32(p.std)).astype(dtype)

    if p.axes[0] != "layers":
        return one(key, p.shape)
    return jax.lax.map(lambda key: one(key, p.shape[1:]), jax.random.split(key, p.shape[0]))


def unstack(params: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The same parameters with layers as a tuple, which `hidden` runs as an unrolled loop."""
    stacked = params["layers"]
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(cfg.layers))
    return {**params, "layers": layers}
