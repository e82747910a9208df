"""Pages out of a pool and into one.

Page numbers flow in with a pool; what the pages hold flows out, or in and is written.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.rollout.cache import Pool
from forge_jax.rollout.tracing import traces


@jax.jit
def export(pool: Pool, pages: Int[Array, " n"]) -> Float[Array, "n layers 2 K page D"]:
    """A copy of some pages, all layers of each together."""
    traces["export"] += 1
    return jnp.stack([jnp.stack([x[pages] for x in layer], axis=1) for layer in pool], axis=1)


@partial(jax.jit, donate_argnames="pool")
def ingest(pool: Pool, pages: Int[Array, " n"], data: Float[Array, "n layers 2 K page D"]) -> Pool:
    """The pool with `data`, as `export` gives it, in some of its pages."""
    traces["ingest"] += 1

    def one(index: int, layer: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, values = (
            x.at[pages].set(data[:, index, part], mode="promise_in_bounds")
            for part, x in enumerate(layer)
        )
        return keys, values

    return tuple(one(i, layer) for i, layer in enumerate(pool))
