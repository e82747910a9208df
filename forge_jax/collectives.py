"""Collectives with the transposes that sharded models need, for use inside a `shard_map`.

What a rank holds flows in and out. Each pair of forward and backward pass is said outright,
so that gradients do not rest on what a mapped function is known to vary over: `enter` and
`leave` bracket what ranks compute in parts (Megatron-LM, arXiv 1909.08053, section 3), `whole`
undoes a cut. With no axes each is the identity.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

Axes = tuple[str, ...]
# Named scope of what weights and their gradients travel in, for profiles and `experiments.plan`.
LENDING = "weights"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The axes of the enclosing `shard_map` over which a model is computed in parts.

    Without one, where the compiler cuts what is computed, it cannot cut experts: over the mesh
    `spread` these are mapped by themselves.
    """

    tensor: Axes = ()  # heads, hidden units and vocabulary; tokens are the same on all ranks
    expert: Axes = ()  # experts; each rank has tokens of its own
    spread: Mesh | None = None
    rows: Axes = ()  # of `spread`, over which rows are dealt out where weights leave them free


UNCUT = Cut()


def enter(x: Array, axes: Axes) -> Array:
    """`x`, the same on all ranks, each of which goes on with a part: gradients are summed."""
    return _enter(x, axes) if axes else x


def leave(x: Array, axes: Axes) -> Array:
    """The sum of the ranks' parts, the same on all ranks; gradients pass as they are."""
    return _leave(x, axes) if axes else x


def whole(x: Array, axes: Axes, dim: int = 0, *, wide: bool = False) -> Array:
    """All ranks' parts of dimension `dim`, in order of the ranks, which use it each for itself.

    Gradients are summed over the ranks in at least float32, and in the dtype of `x` each rank
    gets that of its part. With `wide` the result, though not what travels, is in at least
    float32 itself, so that gradients are not rounded before they are summed.
    """
    return _whole(x, axes, dim, wide) if axes else x


def weights(x: Array, axes: Axes, dim: int, dtype: Any) -> Array:
    """All ranks' parts of a weight, cast to `dtype` before they travel.

    Its gradient is summed over the ranks in at least float32 and has the dtype of `x`, with no
    rounding between.
    """
    return _weights(x, axes, dim, jnp.dtype(dtype))


def shared_sum(x: Array, axes: Axes, dim: int = 0) -> Array:
    """The sum of the ranks' `x`, of which each rank keeps its part of dimension `dim`.

    The counterpart of `whole`: summed in at least float32, gradients are gathered.
    """
    return _shared_sum(x, axes, dim) if axes else x


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x, axes):
    return x


def _enter_forward(x, axes):
    return x, None


def _enter_backward(axes, _, g):
    return (jax.lax.psum(_wide(g), axes).astype(g.dtype),)


_enter.defvjp(_enter_forward, _enter_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leave(x, axes):
    return jax.lax.psum(_wide(x), axes).astype(x.dtype)


def _leave_forward(x, axes):
    return _leave(x, axes), None


def _leave_backward(axes, _, g):
    return (g,)


_leave.defvjp(_leave_forward, _leave_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _whole(x, axes, dim, wide):
    y = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return _wide(y) if wide else y


def _whole_forward(x, axes, dim, wide):
    return _whole(x, axes, dim, wide), jnp.zeros((0,), x.dtype)


def _whole_backward(axes, dim, wide, like, g):
    summed = jax.lax.psum_scatter(_wide(g), axes, scatter_dimension=dim, tiled=True)
    return (summed.astype(like.dtype),)


_whole.defvjp(_whole_forward, _whole_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _weights(x, axes, dim, dtype):
    x = x.astype(dtype)
    with jax.named_scope(LENDING):
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _weights_forward(x, axes, dim, dtype):
    return _weights(x, axes, dim, dtype), jnp.zeros((0,), x.dtype)


def _weights_backward(axes, dim, dtype, like, g):
    if axes:
        with jax.named_scope(LENDING):
            g = jax.lax.psum_scatter(_wide(g), axes, scatter_dimension=dim, tiled=True)
    return (g.astype(like.dtype),)


_weights.defvjp(_weights_forward, _weights_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _shared_sum(x, axes, dim):
    summed = jax.lax.psum_scatter(_wide(x), axes, scatter_dimension=dim, tiled=True)
    return summed.astype(x.dtype)


def _shared_sum_forward(x, axes, dim):
    return _shared_sum(x, axes, dim), None


def _shared_sum_backward(axes, dim, _, g):
    return (jax.lax.all_gather(g, axes, axis=dim, tiled=True),)


_shared_sum.defvjp(_shared_sum_forward, _shared_sum_backward)
