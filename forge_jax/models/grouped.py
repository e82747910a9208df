"""Products of sorted rows with the matrix of their group, as fast forward as backward.

Rows, one group after another, and the groups' sizes flow in; their products flow out. Rows
past the last group give nothing that is defined: callers mask them, on both passes.

`jax.lax.ragged_dot` has kernels on accelerators, but its gradient for the matrices has none:
compilers make that a product of all rows for every group. So it is spelled out here.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from forge_jax.models.layers import accumulator

TILE = (512, 512, 1024)  # rows and the two sides of a matrix, of the TPU kernel
BLOCK = 512  # rows that are multiplied at once elsewhere


@jax.custom_vjp
def grouped_dot(
    rows: Float[Array, "R A"], matrices: Float[Array, "X A B"], sizes: Int[Array, " X"]
) -> Float[Array, "R B"]:
    """``rows[r] @ matrices[x]`` for the group x of row r."""
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _forward(rows, matrices, sizes):
    return grouped_dot(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(saved, dy):
    rows, matrices, sizes = saved
    drows = jax.lax.ragged_dot(dy, jnp.swapaxes(matrices, 1, 2), sizes)
    return drows, grouped_outer(rows, dy, sizes).astype(matrices.dtype), None


grouped_dot.defvjp(_forward, _backward)


def grouped_outer(
    a: Float[Array, "R A"], b: Float[Array, "R B"], sizes: Int[Array, " X"]
) -> Float[Array, "X A B"]:
    """For each group the sum of ``outer(a[r], b[r])`` over its rows, in at least float32."""
    if a.dtype == jnp.float64:
        return outer_blocks(a, b, sizes)
    return jax.lax.platform_dependent(a, b, sizes, tpu=outer_tpu, default=outer_blocks)


def outer_tpu(a: Array, b: Array, sizes: Array, interpret: bool = False) -> Array:
    """`grouped_outer` by a TPU kernel of JAX's."""
    tile = min(TILE[0], -(-len(a) // 128) * 128)
    spare = -len(a) % tile
    a, b = (jnp.pad(x, ((0, spare), (0, 0))) for x in (a, b))
    tiling = (tile, min(TILE[1], a.shape[1]), min(TILE[2], b.shape[1]))
    return tgmm(a.T, b, sizes, jnp.float32, tiling, interpret=interpret)


def outer_blocks(a: Array, b: Array, sizes: Array) -> Array:
    """`grouped_outer` by plain products, block after block of each group's rows."""
    rows = min(BLOCK, len(a))
    a, b = (jnp.pad(x, ((0, rows), (0, 0))) for x in (a, b))  # a last block may look past the end
    stop = jnp.cumsum(sizes)
    dot = partial(jnp.matmul, preferred_element_type=accumulator(a))

    def group(_: None, ends: tuple[Array, Array]) -> tuple[None, Array]:
        start, stop = ends

        def block(i: Array, total: Array) -> Array:
            at = start + i * rows
            left, right = (jax.lax.dynamic_slice_in_dim(x, at, rows) for x in (a, b))
            inside = (at + jnp.arange(rows) < stop)[:, None]
            return total + dot(jnp.where(inside, left, 0).T, jnp.where(inside, right, 0))

        zeros = jnp.zeros((a.shape[1], b.shape[1]), accumulator(a))
        return None, jax.lax.fori_loop(0, (stop - start + rows - 1) // rows, block, zeros)

    return jax.lax.scan(group, None, (stop - sizes, stop))[1]
