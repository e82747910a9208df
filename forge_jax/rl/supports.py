"""What edges were drawn from, on the device: logits as the sampler changed them.

Supports and logits of a chunk of edges flow in, logits of what was sampled flow out. Invariant:
an edge that nothing is said of has its logits over its temperature, to the bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from forge_jax.drawing import CLOSED, Support
from forge_jax.trees import pytree

NEVER = -1e30  # logit of what cannot come: finite, so that no derivative is NaN


@pytree
class Supports:
    """`drawing.Support` as the device has it; leading axes as of the edges."""

    ids: jax.Array | np.ndarray  # i32[E, S]
    offsets: jax.Array | np.ndarray  # f32[E, S]
    closed: jax.Array | np.ndarray  # bool[E]


def to_device(support: Support | None) -> Supports | None:
    """Supports of trained edges, none of which is lost."""
    if support is None:
        return None
    return Supports(ids=support.ids, offsets=support.offsets, closed=support.kind == CLOSED)


def in_chunks(supports: Supports, chunk: int) -> Supports:
    """With axes [chunks, chunk] in place of [E]; nothing is said of the edges added."""

    def cut(x: jax.Array | np.ndarray, unused: int) -> Array:
        missing = -len(x) % chunk
        padded = jnp.pad(
            jnp.asarray(x), ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=unused
        )
        return padded.reshape(-1, chunk, *x.shape[1:])

    return Supports(
        ids=cut(supports.ids, -1), offsets=cut(supports.offsets, 0), closed=cut(supports.closed, 0)
    )


def supported(
    z: Float[Array, "M V"],
    temperature: Float[Array, " M"],
    supports: Supports | None,
    first: Int[Array, ""],
) -> Float[Array, "M V"]:
    """``(z + offset) / temperature`` of M edges, `NEVER` at words that cannot come. Column 0 is
    word `first`."""
    temperature = temperature.astype(z.dtype)[:, None]
    if supports is None:
        return z / temperature
    column = supports.ids - first
    # Out of bounds, so that it is dropped; a negative index would count from the end.
    column = jnp.where((supports.ids >= 0) & (column >= 0), column, z.shape[1])
    row = jnp.arange(len(z))[:, None]
    offset = jnp.where(supports.closed, -jnp.inf, 0.0).astype(z.dtype)
    offset = jnp.broadcast_to(offset[:, None], z.shape)
    offset = offset.at[row, column].set(supports.offsets.astype(z.dtype), mode="drop")
    return jnp.where(offset == -jnp.inf, NEVER, (z + offset) / temperature)
