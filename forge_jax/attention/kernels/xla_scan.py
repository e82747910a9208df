"""Prefix-tree attention as XLA loops over the live tiles of a plan.

Queries, keys, values and a `TilePlan` flow in; outputs and log-sum-exps flow out, and
gradients back. Nothing of size [T, S] exists, and what a query does not see cannot reach
it: not even a NaN.

A step is one query tile against several key tiles: all query heads of a key head share the
keys and the mask, so that each key head is one product of [G * tile, D] by [D, keys]. XLA
splits a product over the cores of a CPU only if it is large; that is why steps are wide.
Online softmax after Milakov and Gimelshein (arXiv 1805.02867) and Dao et al. (2205.14135):
with ``p = exp(s - lse)`` and ``delta = Σ do o - dlse``, the backward pass is ``dv = pᵀ do``,
``ds = p (do vᵀ - delta)``, ``dq = ds k``, ``dk = dsᵀ q``; under a softcap c, ds gains the
factor ``1 - (s / c)²``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from forge_jax.attention.plan import TilePlan, padded_length
from forge_jax.attention.steps import Steps

# Full precision also where a device would rather round float32 factors.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def scan_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """See `forge_jax.attention.tree.tree_attention`; the plan is one of steps."""
    return _attend(q, k, v, jax.tree.map(jnp.asarray, plan), scale, softcap)


@partial(jax.custom_vjp, nondiff_argnames=("scale", "softcap"))
def _attend(q, k, v, plan, scale, softcap):
    return _forward(q, k, v, plan, scale, softcap)[0]


def _forward(q, k, v, plan, scale, softcap):
    (tokens, heads, _), kv = q.shape, k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    low = float(jnp.finfo(wide).min)
    tile = plan.tile[0]
    queries = _query_tiles(q.astype(wide) * scale, kv, tile)
    # A value that is not finite moves into the scores of its key, where the mask stops it.
    keys = _by_head((k + _taint(v)[:, None, None]).astype(q.dtype).astype(wide), plan)
    values = _by_head(_finite(v).astype(q.dtype).astype(wide), plan)
    q_ids, k_ids = _query_ids(plan, heads // kv), jnp.stack([plan.k_id, plan.k_exit])

    def step(width, masked, n, carry):
        acc, top, total = carry
        row, at = _step(plan, width, n)
        s = _cap(einsum("kqd,ksd->kqs", _read(queries, row), _take(keys, at)), softcap)
        if masked:
            sees = _sees(plan, _read(q_ids, row)[:, :, None], _take(k_ids, at)[:, None, :])
            s = jnp.where(sees[None], s, low)
        old = _read(top, row)
        new = jnp.maximum(old, jnp.max(s, axis=-1))
        p, keep = jnp.exp(s - new[..., None]), jnp.exp(old - new)
        out = _read(acc, row) * keep[..., None] + einsum("kqs,ksd->kqd", p, _take(values, at))
        weight = _read(total, row) * keep + jnp.sum(p, axis=-1)
        return _write(acc, out, row), _write(top, new, row), _write(total, weight, row)

    # `top` starts between `low` and any score, so that a key nobody sees weighs exactly 0.
    none = jnp.zeros(queries.shape[:-1], wide)
    acc, top, total = _loop(plan, step, (jnp.zeros_like(queries), none + low / 2, none))
    seen = total != 0
    safe = jnp.where(seen, total, 1)
    lse = jnp.where(seen, top + jnp.log(safe), -jnp.inf)
    o = _tokens(acc / safe[..., None], tokens, heads, tile).astype(q.dtype)
    lse = _tokens(lse[..., None], tokens, heads, tile)[..., 0].T
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention")
    return (o, lse), (q, k, v, plan, o, lse)


def _backward(scale, softcap, saved, cotangent):
    q, k, v, plan, o, lse = saved
    do, dlse = cotangent
    (tokens, heads, _), (n_keys, kv, _) = q.shape, k.shape
    wide, seen = lse.dtype, ~jnp.isneginf(lse.T)
    delta = jnp.sum(do.astype(wide) * o.astype(wide), axis=-1) - jnp.where(seen, dlse.T, 0)
    tiles = partial(_query_tiles, kv=kv, tile=plan.tile[0])
    queries, d_out = tiles(_finite(q).astype(wide) * scale), tiles(do.astype(wide))
    lse, delta = (tiles(x[..., None])[..., 0] for x in (jnp.where(seen, lse.T, 0), _finite(delta)))
    keys, values = (_by_head(_finite(x).astype(q.dtype).astype(wide), plan) for x in (k, v))
    q_ids, k_ids = _query_ids(plan, heads // kv), jnp.stack([plan.k_id, plan.k_exit])

    def step(width, masked, n, carry):
        dq, dk, dv = carry
        row, at = _step(plan, width, n)
        q, do, k = _read(queries, row), _read(d_out, row), _take(keys, at)
        # Scores lie as [keys, queries]: the products for dk and dv then need no transpose.
        s = _cap(einsum("ksd,kqd->ksq", k, q), softcap)
        p = jnp.exp(s - _read(lse, row)[:, None, :])
        if masked:
            sees = _sees(plan, _read(q_ids, row)[:, None, :], _take(k_ids, at)[:, :, None])
            p = jnp.where(sees[None], p, 0)
        dp = einsum("ksd,kqd->ksq", _take(values, at), do)
        ds = p * (dp - _read(delta, row)[:, None, :])
        if softcap is not None:
            ds = ds * (1 - jnp.square(s / softcap))
        return (
            _write(dq, _read(dq, row) + einsum("ksd,ksq->kdq", k, ds), row),
            dk.at[at].add(einsum("ksq,kqd->ksd", ds, q).transpose(1, 0, 2)),
            dv.at[at].add(einsum("ksq,kqd->ksd", p, do).transpose(1, 0, 2)),
        )

    none = jnp.zeros((plan.k_id.shape[0], *k.shape[1:]), wide)
    dq, dk, dv = _loop(plan, step, (jnp.zeros_like(queries.swapaxes(2, 3)), none, none))
    dq = _tokens(dq.swapaxes(2, 3) * scale, tokens, heads, plan.tile[0])
    return dq.astype(q.dtype), dk[:n_keys].astype(k.dtype), dv[:n_keys].astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _loop(plan: TilePlan, step: Callable, carry: Any) -> Any:
    """Runs `step(width, masked, n, carry)` over the steps of the plan, width by width.

    The bounds are data, so the padding of the lists costs nothing.
    """
    steps = _steps(plan)
    for group, width in enumerate(steps.widths):
        body = partial(step, width, group > 0)
        carry = lax.fori_loop(steps.start[group], steps.start[group + 1], body, carry)
    return carry


def _step(plan: TilePlan, width: int, n: Array) -> tuple[Array, Array]:
    """The query tile of step n, and the keys [width * tile] that it takes on."""
    steps, tile = _steps(plan), plan.tile[1]
    first = steps.first[n]
    columns = lax.dynamic_slice(steps.column, (first,), (width,))
    at = columns[:, None] * tile + jnp.arange(tile, dtype=columns.dtype)[None, :]
    return steps.row[first], at.reshape(-1)


def _steps(plan: TilePlan) -> Any:
    assert isinstance(plan.lists, Steps)
    return plan.lists


def _sees(plan: TilePlan, queries: Array, keys: Array) -> Array:
    """The predicate on (id, first id seen) of queries and (id, exit) of keys."""
    (q_id, q_from), (k_id, k_exit) = queries, keys
    sees = (k_id <= q_id) & (q_id < k_exit)
    return sees & (q_from <= k_id) if plan.windowed else sees


def _cap(s: Array, softcap: float | None) -> Array:
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _query_tiles(x: Array, kv: int, tile: int) -> Array:
    """[T, H, D] to [tiles, K, G * tile, D]: what one key head serves lies together."""
    tokens, heads, d = x.shape
    x = _pad(x, padded_length(tokens, tile)).reshape(-1, tile, kv, heads // kv, d)
    return x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], kv, -1, d)


def _tokens(x: Array, tokens: int, heads: int, tile: int) -> Array:
    """The inverse of `_query_tiles`."""
    tiles, kv, _, d = x.shape
    x = x.reshape(tiles, kv, heads // kv, tile, d).transpose(0, 3, 1, 2, 4)
    return x.reshape(tiles * tile, heads, d)[:tokens]


def _query_ids(plan: TilePlan, group: int) -> Array:
    """Id and first id seen of the rows of `_query_tiles`, [tiles, 2, G * tile]."""
    ids = (plan.q_id, plan.q_from)
    return jnp.stack([jnp.tile(x.reshape(-1, plan.tile[0]), (1, group)) for x in ids], axis=1)


def _by_head(x: Array, plan: TilePlan) -> Array:
    """[S, K, D] to [K, S', D], with the padding of the plan's keys."""
    return _pad(x, plan.k_id.shape[0]).transpose(1, 0, 2)


def _pad(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, length - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _finite(x: Array) -> Array:
    """`x` without its NaN and infinities, which would outlive a product with weight 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _taint(x: Array) -> Array:
    """[T, H, D] to [T]: NaN at a token with anything that is not finite, else 0."""
    return jnp.einsum("thd,hd->t", x, jnp.zeros(x.shape[1:], x.dtype))


def _take(x: Array, at: Array) -> Array:
    return x.at[:, at].get(mode="promise_in_bounds")


def _read(x: Array, row: Array) -> Array:
    return lax.dynamic_index_in_dim(x, row, keepdims=False)


def _write(x: Array, value: Array, row: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value, row, 0)
