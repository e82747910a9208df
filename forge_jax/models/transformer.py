"""The decoder-only transformer of the Qwen3 family, as pure functions of its parameters.

Tokens and positions flow in, hidden states and logits flow out. Attention is an
argument, so that one model serves tree training, prefill, decoding and tests; the
model itself knows of order only through `positions`, never through an index.

Source: Qwen3 technical report, arXiv 2505.09388 (grouped queries, RMS norm on every
query and key head, rotary embedding with split halves, SwiGLU, no biases).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.models.config import ModelConfig
from forge_jax.trees import Param, is_param

# (q[..., T, H, D], k[..., T, K, D], v[..., T, K, D], layer cache) -> (o[..., T, H, D], layer cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
REMAT = ("none", "block")


def layout(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, described once; layers are stacked on a leading axis."""
    e, h, k, d, f = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.ffn

    def weight(*sides: tuple[int, str | None]) -> Param:
        sizes, axes = zip((cfg.layers, "layers"), *sides, strict=True)
        return Param(sizes, axes, cfg.init_std)

    def norm(size: int) -> Param:
        return Param((cfg.layers, size), ("layers", None), 0.0)

    top = {
        "embed": Param((cfg.vocab, e), ("vocab", "embed"), cfg.init_std),
        "layers": {
            "input_norm": norm(e),
            "q": weight((e, "embed"), (h, "heads"), (d, None)),
            "k": weight((e, "embed"), (k, "kv_heads"), (d, None)),
            "v": weight((e, "embed"), (k, "kv_heads"), (d, None)),
            "q_norm": norm(d),
            "k_norm": norm(d),
            "o": weight((h, "heads"), (d, None), (e, "embed")),
            "post_norm": norm(e),
            "gate": weight((e, "embed"), (f, "ffn")),
            "up": weight((e, "embed"), (f, "ffn")),
            "down": weight((f, "ffn"), (e, "embed")),
        },
        "norm": Param((e,), (None,), 0.0),
    }
    if not cfg.tied:
        top["unembed"] = Param((e, cfg.vocab), ("embed", "vocab"), cfg.init_std)
    return top


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def init(cfg: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Fresh parameters: normal weights, unit norm scales.

    Values are drawn in fp32 and cast, so that every dtype starts from the same model.
    """
    leaves, tree = jax.tree.flatten(layout(cfg), is_leaf=is_param)
    sizes = [math.prod(p.shape) if p.std else 0 for p in leaves]
    # One draw for all: compiling a generator for each shape takes longer than drawing.
    normal = jax.random.normal(key, (sum(sizes),), jnp.float32)
    ends = list(itertools.accumulate(sizes))

    def take(p: Param, end: int, size: int) -> Array:
        if p.std == 0:
            return jnp.ones(p.shape, dtype)
        return (normal[end - size : end].reshape(p.shape) * jnp.float32(p.std)).astype(dtype)

    return jax.tree.unflatten(tree, map(take, leaves, ends, sizes))


def unstack(params: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The same parameters with layers as a tuple, which `hidden` runs as an unrolled loop."""
    stacked = params["layers"]
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(cfg.layers))
    return {**params, "layers": layers}


def hidden(
    params: dict[str, Any],
    tokens: Int[Array, "... T"],
    positions: Int[Array, "... T"],
    attend: Attend,
    cfg: ModelConfig,
    cache: Any = None,
    remat: str = "none",
) -> tuple[Float[Array, "... T E"], Any]:
    """Final-normed hidden states in the dtype of the parameters, and the new cache.

    `cache` has a leading layer axis where layers are stacked and is a tuple where they
    are; each layer's part goes through `attend`. `remat="block"` keeps only the residual
    stream between layers for the backward pass. Raises ValueError on another `remat`.
    """
    if remat not in REMAT:
        raise ValueError(f"{remat=} must be one of {REMAT}")
    h = params["embed"][tokens]
    rotation = _rotation(positions, cfg, _accumulator(h))
    stacked = isinstance(params["layers"], dict)

    def block(h: Array, layer: dict[str, Array], cache: Any) -> tuple[Array, Any]:
        return _block(h, layer, cache, rotation, attend, cfg)

    if remat == "block":
        # Inside a scan nothing can merge the recomputation with the forward pass anyway.
        block = jax.checkpoint(block, prevent_cse=not stacked)
    if stacked:
        h, cache = jax.lax.scan(lambda h, x: block(h, *x), h, (params["layers"], cache))
    else:
        caches = cache if cache is not None else (None,) * cfg.layers
        after = []
        for layer, before in zip(params["layers"], caches, strict=True):
            h, new = block(h, layer, before)
            after.append(new)
        cache = None if cache is None else tuple(after)
    return _rms_norm(h, params["norm"], cfg.norm_eps), cache


def unembedding(params: dict[str, Any], cfg: ModelConfig) -> Float[Array, "E V"]:
    """The output matrix, whether it is tied to the embedding or not."""
    return params["embed"].T if cfg.tied else params["unembed"]


def logits(
    params: dict[str, Any], h: Float[Array, "... E"], cfg: ModelConfig
) -> Float[Array, "... V"]:
    """Next-token logits: products and sums in fp32, in fp64 where the parameters are fp64."""
    return jnp.einsum(
        "...e,ev->...v",
        h,
        unembedding(params, cfg),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(h),
    )


def _block(
    h: Array, layer: dict[str, Array], cache: Any, rotation: Array, attend: Attend, cfg: ModelConfig
) -> tuple[Array, Any]:
    with jax.named_scope("attention"):
        x = _rms_norm(h, layer["input_norm"], cfg.norm_eps)
        q, k, v = (_linear(x, layer[name]) for name in ("q", "k", "v"))
        q = _rotate(_rms_norm(q, layer["q_norm"], cfg.norm_eps), rotation)
        k = _rotate(_rms_norm(k, layer["k_norm"], cfg.norm_eps), rotation)
        o, cache = attend(q, k, v, cache)
        h = h + _linear(o, layer["o"], inputs=2)
    with jax.named_scope("mlp"):
        x = _rms_norm(h, layer["post_norm"], cfg.norm_eps)
        gated = jax.nn.silu(_linear(x, layer["gate"])) * _linear(x, layer["up"])
        h = h + _linear(gated, layer["down"])
    return h, cache


def _linear(x: Array, weight: Array, inputs: int = 1) -> Array:
    """Contracts the last `inputs` axes of x with the first ones of `weight`.

    As one plain matrix product, which XLA:CPU runs faster than a contraction over heads.
    """
    size = math.prod(weight.shape[:inputs])
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*x.shape[: x.ndim - inputs], *weight.shape[inputs:])


def _accumulator(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / rms(x) * scale over the last axis; the statistics are at least fp32."""
    wide = x.astype(_accumulator(x))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def _rotation(positions: Array, cfg: ModelConfig, dtype: Any) -> Array:
    """cos and sin of the rotary angles, [2, ..., T, 1, D/2]: one for all heads and layers."""
    exponent = jnp.arange(0, cfg.head_dim, 2, dtype=dtype) / cfg.head_dim
    frequency = cfg.rope_theta**-exponent
    angle = jnp.einsum("...t,d->...td", positions.astype(dtype), frequency)[..., None, :]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def _rotate(x: Array, rotation: Array) -> Array:
    """Rotary embedding (arXiv 2104.09864) on (first half, second half) pairs; x[..., T, H, D]."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
