"""What transformer blocks are made of: matrix products, norms, rotary positions.

Activations and weights flow in, activations out, in the dtype they came in; statistics and
angles are computed in at least fp32.
"""

import math
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.models.config import ModelConfig, RopeScaling
from forge_jax.trees import pytree


@pytree
class Adapted:
    """A weight and its low-rank adapter, see `models.lora`."""

    weight: Array  # [in..., out...]
    a: Array  # [in..., rank]
    b: Array  # [rank, out...]
    scale: float = field(metadata={"static": True})


def linear(x: Array, weight: Array | Adapted, inputs: int = 1) -> Array:
    """Contracts the last `inputs` axes of x with the first ones of `weight`.

    As one plain matrix product, which XLA:CPU runs faster than a contraction over heads.
    """
    if isinstance(weight, Adapted):
        low = linear(x, weight.a, inputs)
        return linear(x, weight.weight, inputs) + weight.scale * linear(low, weight.b)
    size = math.prod(weight.shape[:inputs])
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*x.shape[: x.ndim - inputs], *weight.shape[inputs:])


def accumulator(x: Array) -> Any:
    """The dtype in which sums over `x` are made."""
    return jnp.promote_types(x.dtype, jnp.float32)


def rms_norm(x: Float[Array, "... E"], scale: Float[Array, " E"], eps: float) -> Array:
    """``x / rms(x) * scale`` over the last axis (arXiv 1910.07467)."""
    wide = x.astype(accumulator(x))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def rotation(
    positions: Int[Array, "... T"], cfg: ModelConfig, dtype: Any
) -> Float[Array, "2 ... T 1 R"]:
    """cos and sin of the rotary angles, one for each of R pairs, of all heads and layers."""
    exponent = jnp.arange(0, cfg.rotated, 2, dtype=dtype) / cfg.rotated
    frequency = cfg.rope_theta**-exponent
    if cfg.rope_scaling is not None:
        frequency = _stretched(frequency, cfg.rope_scaling)
    angle = jnp.einsum("...t,d->...td", positions.astype(dtype), frequency)[..., None, :]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def _stretched(frequency: Array, by: RopeScaling) -> Array:
    """Llama 3.1's frequencies: low ones divided by a factor, high ones kept, those between
    interpolated by their wavelength."""
    turns = by.original_context * frequency / (2 * math.pi)  # over the original context
    keep = (turns - by.low_frequency) / (by.high_frequency - by.low_frequency)
    keep = jnp.clip(keep, 0.0, 1.0)
    return frequency * (keep + (1 - keep) / by.factor)


def rotate(x: Float[Array, "... T H D"], rotation: Float[Array, "2 ... T 1 R"]) -> Array:
    """Rotary embedding (arXiv 2104.09864) on (first half, second half) pairs of the leading 2R
    dimensions of each head; the others pass."""
    cos, sin = rotation
    pairs = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(cos.dtype), (pairs, 2 * pairs), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
