"""The pool of pages, and the attention that reads and writes it.

A pool is a tuple with one (keys, values) pair a layer, each ``[P, K, page, D]``: page, kv head,
place, head dim. Which pages are whose is the host's affair: tables come with every call. Page
`SCRATCH` is nobody's; what is of no use is written there. Invariant: a position is written
before anything reads it, so what an earlier owner left in a page is never seen.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import Array, Float, Int

from forge_jax.attention.paged import gathered_attention, merge, view
from forge_jax.models.config import ModelConfig
from forge_jax.models.transformer import Attend
from forge_jax.rollout.access import HEADS, PAGES, ROWS, Access, Pool, cut_heads
from forge_jax.rollout.packets import SCRATCH
from forge_jax.sharding import rows_over


def pool_sharding(like: Sharding, cfg: ModelConfig, places: int = 1) -> Sharding:
    """Where a pool lives, given where a parameter does: kv heads are cut as their weights, and
    pages are dealt to `places`, all of the mesh's or one."""
    if not isinstance(like, NamedSharding):
        return like
    assert isinstance(like.mesh, Mesh)
    rows = None if places == 1 else rows_over(like.mesh)
    return NamedSharding(like.mesh, jax.P(rows, cut_heads(cfg.kv_heads, like.mesh)))


def beside(pool: Sharding) -> Sharding:
    """Where states of slots and of pages live, by their first dimension."""
    if not isinstance(pool, NamedSharding):
        return pool
    return NamedSharding(pool.mesh, jax.P(*pool.spec[:1]))


def empty_pool(
    cfg: ModelConfig, pages: int, page: int, dtype: Any, sharding: Sharding, modules: int = 0
) -> Pool:
    """Zeroed keys and values for every layer, then for every prediction module."""
    shape = (pages, cfg.kv_heads, page, cfg.head_dim)

    def zeros() -> Array:
        return jnp.zeros(shape, dtype, device=sharding)  # nowhere whole

    return tuple((zeros(), zeros()) for _ in range(cfg.layers + modules))


def written(
    layer: tuple[Array, Array],
    new: tuple[Float[Array, "... K D"], Float[Array, "... K D"]],
    page: Int[Array, "..."],
    place: Int[Array, "..."],
) -> tuple[Array, Array]:
    """A layer of the pool with new keys and values at places of pages."""
    keys, values = (
        old.at[page, :, place].set(x.astype(old.dtype), mode="promise_in_bounds")
        for old, x in zip(layer, new, strict=True)
    )
    return keys, values


def prefill_attend(
    table: Int[Array, "R C"], position: Int[Array, "R T"], real: Array, access: Access
) -> Attend:
    """Attention of R spans of tokens over all of their sequences up to themselves.

    Keys and values of tokens that are `real`, bool[R, T], go to the pages of the tables.
    """
    return _at_places(partial(_prefill_attend, access=access), (table, position, real), access)


def _at_places(make: Callable[..., Attend], given: tuple[Any, ...], access: Access) -> Attend:
    """What `make` makes of `given`, rows first, for every place by itself."""
    if access.places == 1:
        return make(*given)

    def attend(q: Array, k: Array, v: Array, layer: Any) -> tuple[Array, Any]:
        def here(given: Any, q: Array, k: Array, v: Array, layer: Any) -> tuple[Array, Any]:
            return make(*given)(q, k, v, layer)

        ins, kv_heads = (ROWS, HEADS, HEADS, HEADS, PAGES), k.shape[2]
        return access.each(here, ins, (HEADS, PAGES), kv_heads)(given, q, k, v, layer)

    return attend


def _prefill_attend(table: Array, position: Array, real: Array, access: Access) -> Attend:
    page = access.page
    index = jnp.where(real, position // page, 0)
    target = jnp.where(real, jnp.take_along_axis(table, index, axis=1), SCRATCH)
    last = jnp.where(real, position, -1)

    def attend(q: Array, k: Array, v: Array, layer: tuple[Array, Array]) -> tuple[Array, Any]:
        layer = written(layer, (k, v), target, position % page)
        over_pages = access.over_pages(layer[0], 1 / math.sqrt(q.shape[-1]))
        o, _ = over_pages(q, *layer, table, last)
        return o.astype(q.dtype), layer

    return attend


class Views(NamedTuple):
    """What the rows of a decode call read of one layer, side by side.

    Keys are [.., K, D, S], values [.., K, S, D]: either is the second factor of a product as it
    lies, which takes XLA on CPU half to a seventh of the time that other keys take.
    """

    shared: tuple[Array, Array] | None  # of bundles, read by all of their rows
    own: tuple[Array, Array]  # of rows; what is decoded is written here first


class Tables(NamedTuple):
    """Which pages the rows of a decode call read."""

    own: Int[Array, "B C"]
    shared: Int[Array, "bundles S"]
    pages: Int[Array, " bundles"]  # that a bundle reads


def before_own(tables: Tables, page: int) -> Int[Array, " B"]:
    """Tokens of every row that its bundle reads for it."""
    rows = len(tables.own) // len(tables.pages)
    return jnp.repeat(tables.pages, rows) * page


def opened(pool: Pool, tables: Tables, access: Access) -> tuple[Views, ...]:
    """Copies of the pages that a decode call reads, taken once for all of its steps."""
    kv_heads = pool[0][0].shape[1]
    return access.each(_opened, (PAGES, ROWS), PAGES, kv_heads)(pool, tables)


def _opened(pool: Pool, tables: Tables) -> tuple[Views, ...]:
    def pair(layer: tuple[Array, Array], table: Array) -> tuple[Array, Array]:
        keys, values = layer
        return jnp.swapaxes(view(keys, table), 2, 3), view(values, table)

    def views(layer: tuple[Array, Array]) -> Views:
        shared = pair(layer, tables.shared) if tables.shared.shape[1] else None
        return Views(shared=shared, own=pair(layer, tables.own))

    return tuple(views(layer) for layer in pool)


def closed(
    pool: Pool,
    views: tuple[Views, ...],
    tables: Tables,
    first: Int[Array, " B"],
    count: int,
    access: Access,
) -> Pool:
    """The pool with what `count` positions of every own view hold from `first` on."""
    ins, kv_heads = (PAGES, PAGES, ROWS, ROWS), pool[0][0].shape[1]
    return access.each(partial(_closed, count=count), ins, PAGES, kv_heads)(
        pool, views, tables, first
    )


def _closed(pool: Pool, views: tuple[Views, ...], tables: Tables, first: Array, count: int) -> Pool:
    page = pool[0][0].shape[2]
    index = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]  # [B, count]
    inside = index < tables.own.shape[1] * page
    index = jnp.where(inside, index, 0)
    target = jnp.where(inside, jnp.take_along_axis(tables.own, index // page, axis=1), SCRATCH)

    def one(layer: tuple[Array, Array], seen: Views) -> tuple[Array, Array]:
        keys, values = jnp.swapaxes(seen.own[0], 2, 3), seen.own[1]
        new = tuple(
            jnp.take_along_axis(x, index[:, None, :, None], axis=2).swapaxes(1, 2)
            for x in (keys, values)
        )
        return written(layer, new, target, index % page)  # type: ignore[arg-type]

    return tuple(one(layer, seen) for layer, seen in zip(pool, views, strict=True))


def decode_attend(position: Int[Array, "B T"], tables: Tables, access: Access) -> Attend:
    """A window of T new tokens a row over their sequences up to themselves.

    Tokens behind the pages of a row, which only drafts can be, are not written. What a bundle
    shares is read once for all of its rows, as in cascade inference.
    """
    bundles, page = len(tables.pages), access.page
    index = position - before_own(tables, page)[:, None]
    mode = "promise_in_bounds" if position.shape[1] == 1 else "drop"

    def attend(q: Array, k: Array, v: Array, views: Views) -> tuple[Array, Views]:
        rows, queries, heads, dim = q.shape
        scale = 1 / math.sqrt(dim)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        place: dict[str, Any] = {"mode": mode, "unique_indices": True}
        keys = views.own[0].at[row, :, :, index].set(k, **place)
        values = views.own[1].at[row, :, index].set(v, **place)
        parts = [gathered_attention(q, jnp.swapaxes(keys, 2, 3), values, index, scale=scale)]
        if views.shared is not None:
            together = q.reshape(bundles, -1, heads, dim)
            last = jnp.broadcast_to(
                (tables.pages * page - 1)[:, None], (bundles, together.shape[1])
            )
            before = jnp.swapaxes(views.shared[0], 2, 3), views.shared[1]
            o, lse = gathered_attention(together, *before, last, scale=scale)
            parts.append((o.reshape(q.shape), lse.reshape(rows, queries, heads)))
        o = merge(*parts) if len(parts) > 1 else parts[0][0]
        return o.astype(q.dtype), Views(shared=views.shared, own=(keys, values))

    return attend


def direct_attend(position: Int[Array, "B T"], tables: Tables, access: Access) -> Attend:
    """`decode_attend` over the pages themselves, by the kernel that reads them where they are."""
    bundles, page = len(tables.pages), access.page
    index = position - before_own(tables, page)[:, None]
    inside = index < tables.own.shape[1] * page
    target = jnp.take_along_axis(tables.own, jnp.where(inside, index // page, 0), axis=1)
    target = jnp.where(inside, target, SCRATCH)

    def attend(q: Array, k: Array, v: Array, layer: tuple[Array, Array]) -> tuple[Array, Any]:
        rows, queries, heads, dim = q.shape
        kernel = access.over_pages(layer[0], 1 / math.sqrt(dim))
        layer = written(layer, (k, v), target, index % page)
        parts = [kernel(q, *layer, tables.own, index)]
        if tables.shared.shape[1]:
            together = q.reshape(bundles, -1, heads, dim)
            last = (tables.pages * page - 1)[:, None]
            last = jnp.broadcast_to(last, (bundles, together.shape[1]))
            o, lse = kernel(together, *layer, tables.shared, last)
            parts.append((o.reshape(q.shape), lse.reshape(rows, queries, heads)))
        o = merge(*parts) if len(parts) > 1 else parts[0][0]
        return o.astype(q.dtype), layer

    return attend


def attention_at(position: Int[Array, "B T"], tables: Tables, access: Access) -> Attend:
    """Attention of new tokens over pages, where they lie or in views that were `opened`."""
    make = direct_attend if access.direct else decode_attend
    return _at_places(partial(make, access=access), (position, tables), access)
