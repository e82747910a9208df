"""Pages out of a pool, to other devices, and into another pool.

Page numbers flow in with a pool; what the pages hold flows out, or in and is written. Invariant:
what is exported is a copy, so that any thread may read it, while no other may read the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Array, Float, Int

from forge_jax.rollout.access import Pool
from forge_jax.rollout.packets import SCRATCH
from forge_jax.rollout.tracing import traces
from forge_jax.sharding import replicated
from forge_jax.trees import pytree

MOVED = 16  # pages of one call that moves some
HEADS = -3  # the dimension of `Pages.kv` that meshes cut

Tails = Float[Array, "pages modules E"]


@pytree
class Pages:
    """What pages hold; arrays of a device, or of the host."""

    kv: Array  # [n, layers, 2, K, page, D], keys before values; modules are further layers
    tails: Array | None = None  # [n, modules, E], see `modules.Drafting`; None: no modules


@dataclass(frozen=True, kw_only=True, eq=False)
class Parcel:
    """Pages of a prompt on their way from one pool to another."""

    version: int  # of the weights that made them
    start: int  # number of the first of them in the prompt
    routes: tuple[np.ndarray | None, ...]  # of each page, where they are recorded
    parts: tuple[Pages, ...]  # `MOVED` pages in each, the last filled up

    @property
    def pages(self) -> int:
        return len(self.routes)

    @property
    def nbytes(self) -> int:
        """Of its pages, without what fills up."""
        whole = sum(array.nbytes for array in jax.tree.leaves(self.parts))
        return whole * self.pages // max(MOVED * len(self.parts), 1)


@partial(jax.jit, static_argnames="where")
def export(
    pool: Pool, tails: Tails | None, pages: Int[Array, " n"], where: Sharding | None = None
) -> Pages:
    """A copy of some pages, all layers of each together, cut as `where` says."""
    traces["export"] += 1
    kv = jnp.stack([jnp.stack([x[pages] for x in layer], axis=1) for layer in pool], axis=1)
    last = None if tails is None else tails[pages]
    if isinstance(where, NamedSharding):
        kv = jax.lax.with_sharding_constraint(kv, where)
        last = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, replicated(where)), last)
    return Pages(kv=kv, tails=last)


@partial(jax.jit, donate_argnames=("pool", "tails"))
def ingest(
    pool: Pool, tails: Tails | None, pages: Int[Array, " n"], data: Pages
) -> tuple[Pool, Tails | None]:
    """Pool and tails with `data`, as `export` gives it, in some of their pages."""
    traces["ingest"] += 1

    def one(index: int, layer: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, values = (
            x.at[pages].set(data.kv[:, index, part], mode="promise_in_bounds")
            for part, x in enumerate(layer)
        )
        return keys, values

    if tails is not None:
        assert data.tails is not None, "pages without the states that modules go on from"
        tails = tails.at[pages].set(data.tails, mode="promise_in_bounds")
    return tuple(one(i, layer) for i, layer in enumerate(pool)), tails


def carried(data: Array, where: Sharding) -> Array:
    """`data` as `where` cuts it, over heads alone, as it was cut before on whatever devices; any
    thread may do it.

    By way of the host where devices are the host itself: a copy between two of these waits behind
    whatever both compute.
    """
    if jax.default_backend() == "cpu":
        return jax.device_put(np.asarray(data), where)
    return copied(data, where)


def copied(data: Array, where: Sharding) -> Array:
    """As `carried`, from device to device: nothing passes through the host, and nothing is run
    that several devices would have to run together. (`jax.device_put` copies by way of the host
    where two meshes cut differently.)
    """
    size = data.shape[HEADS]
    pieces = {shard.index[HEADS].indices(size)[:2]: shard.data for shard in data.addressable_shards}
    parts = []
    for device, index in where.addressable_devices_indices_map(data.shape).items():
        assert index is not None, "a device without a part"
        first, last, _ = index[HEADS].indices(size)
        inside = [
            piece[..., max(first - start, 0) : last - start, :, :]
            for (start, stop), piece in sorted(pieces.items())
            if start < last and first < stop
        ]
        here = jax.device_put(inside, device)
        parts.append(here[0] if len(here) == 1 else jnp.concatenate(here, axis=HEADS))
    return jax.make_array_from_single_device_arrays(data.shape, where, parts)


def chunks(pages: Sequence[int]) -> list[np.ndarray]:
    """Page numbers in calls of `MOVED`, the last filled up with scratch."""
    found = np.full(-(-len(pages) // MOVED) * MOVED, SCRATCH, np.int32)
    found[: len(pages)] = pages
    return list(found.reshape(-1, MOVED))
