"""Prefix-tree attention as one XLA loop over the live tiles."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from forge_jax.attention.plan import SKIP, TilePlan, padded_length


def scan_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """See `forge_jax.attention.tree.tree_attention`."""
    return _attend(q, k, v, jax.tree.map(jnp.asarray, plan), scale)


@partial(jax.custom_vjp, nondiff_argnames=("scale",))
def _attend(q, k, v, plan, scale):
    return _forward(q, k, v, plan, scale)[0]


def _tiles(x, heads, tile):
    """[T, H, D] to [T/tile, K, G*tile, D]."""
    t, h, d = x.shape
    n = padded_length(t, tile) // tile
    x = jnp.pad(x, ((0, n * tile - t), (0, 0), (0, 0)))
    return (
        x.reshape(n, tile, heads, h // heads, d)
        .transpose(0, 2, 3, 1, 4)
        .reshape(n, heads, (h // heads) * tile, d)
    )


def _untile(x, tokens, heads, tile):
    n, kv, _, d = x.shape
    x = x.reshape(n, kv, heads // kv, tile, d).transpose(0, 3, 1, 2, 4)
    return x.reshape(n * tile, heads, d)[:tokens]


def _sees(plan, i, group):
    q_id = plan.q_id.reshape(-1, plan.tile)[plan.row[i]]
    k_id = plan.k_id.reshape(-1, plan.tile)[plan.column[i]]
    k_exit = plan.k_exit.reshape(-1, plan.tile)[plan.column[i]]
    sees = (k_id[None, :] <= q_id[:, None]) & (q_id[:, None] < k_exit[None, :])
    return jnp.tile(sees & (plan.kind[i] != SKIP), (group, 1))[None]


def _forward(q, k, v, plan, scale):
    heads, kv = q.shape[1], k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    qt = _tiles(q.astype(wide) * scale, kv, plan.tile)
    kt, vt = (_tiles(x.astype(wide), kv, plan.tile) for x in (k, v))
    low = jnp.finfo(wide).min

    def visit(i, carry):
        acc, top, total = carry
        r, c = plan.row[i], plan.column[i]
        s = jnp.einsum("kqd,ksd->kqs", qt[r], kt[c])
        sees = _sees(plan, i, heads // kv)
        s = jnp.where(sees, s, low)
        new = jnp.maximum(top[r], s.max(-1))
        p = jnp.where(sees, jnp.exp(s - new[..., None]), 0.0)
        keep = jnp.exp(top[r] - new)
        return (
            acc.at[r].set(acc[r] * keep[..., None] + jnp.einsum("kqs,ksd->kqd", p, vt[c])),
            top.at[r].set(new),
            total.at[r].set(total[r] * keep + p.sum(-1)),
        )

    rows = qt.shape[:-1]
    init = jnp.zeros_like(qt), jnp.full(rows, low, wide), jnp.zeros(rows, wide)
    acc, top, total = jax.lax.fori_loop(0, plan.row.shape[0], visit, init)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    o = _untile(acc / safe[..., None], q.shape[0], heads, plan.tile).astype(q.dtype)
    lse = jnp.where(seen, top + jnp.log(safe), -jnp.inf)
    lse = _untile(lse[..., None], q.shape[0], heads, plan.tile)[..., 0].T
    return (o, lse), (q, k, v, plan, o, lse)


def _backward(scale, saved, cotangent):
    q, k, v, plan, o, lse = saved
    do, dlse = cotangent
    heads, kv = q.shape[1], k.shape[1]
    wide = lse.dtype
    tiles = partial(_tiles, heads=kv, tile=plan.tile)
    qt, dot = tiles(q.astype(wide) * scale), tiles(do.astype(wide))
    kt, vt = tiles(k.astype(wide)), tiles(v.astype(wide))
    seen = jnp.isfinite(lse)
    lset = tiles(jnp.where(seen, lse, 0.0).T[..., None])
    delta = (do.astype(wide) * o.astype(wide)).sum(-1) - jnp.where(seen, dlse, 0.0).T
    deltat = tiles(delta[..., None])

    def visit(i, carry):
        dq, dk, dv = carry
        r, c = plan.row[i], plan.column[i]
        s = jnp.einsum("kqd,ksd->kqs", qt[r], kt[c])
        p = jnp.where(_sees(plan, i, heads // kv), jnp.exp(s - lset[r]), 0.0)
        ds = p * (jnp.einsum("kqd,ksd->kqs", dot[r], vt[c]) - deltat[r])
        return (
            dq.at[r].add(jnp.einsum("kqs,ksd->kqd", ds, kt[c])),
            dk.at[c].add(jnp.einsum("kqs,kqd->ksd", ds, qt[r])),
            dv.at[c].add(jnp.einsum("kqs,kqd->ksd", p, dot[r])),
        )

    init = jax.tree.map(jnp.zeros_like, (qt, kt, vt))
    dq, dk, dv = jax.lax.fori_loop(0, plan.row.shape[0], visit, init)
    return (
        _untile(dq * scale, q.shape[0], heads, plan.tile).astype(q.dtype),
        _untile(dk, k.shape[0], kv, plan.tile).astype(k.dtype),
        _untile(dv, v.shape[0], kv, plan.tile).astype(v.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)
