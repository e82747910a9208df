"""Prefix-tree attention as Pallas kernels for TPU (Mosaic): the op and its forward kernel.

Queries, keys, values and a `TilePlan` with `Tiles` flow in; outputs and log-sum-exps flow
out, and gradients back. A grid step is one live pair of tiles of one key head; the lists,
in scalar memory, say which blocks it reads. All query heads of a key head share the keys
and the mask of a step. What a query does not see cannot reach it: not even a NaN.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867) and Dao et al. (2205.14135).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from forge_jax.attention.kernels.mosaic_tpu_backward import gradients
from forge_jax.attention.kernels.mosaic_tpu_blocks import (
    LANES,
    Rule,
    Size,
    Walk,
    by_key,
    by_query,
    dot,
    each_head,
    each_pair,
    finite,
    from_query,
    id_blocks,
    is_sound,
    key_block,
    key_lanes_block,
    query_block,
    row_block,
    run_walk,
    scores,
    visible,
)
from forge_jax.attention.plan import TilePlan
from forge_jax.attention.tiles import Tiles

TILE = (512, 512)  # queries and keys of a tile that suit most lengths
LOW = float(jnp.finfo(jnp.float32).min)  # stands for the score of a key that is not seen
LN2 = 0.6931471805599453


def attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    softcap: float | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """See `forge_jax.attention.tree.tree_attention`; the plan is laid out in "tiles".

    Products are of `q`'s dtype, sums and softmax float32. `interpret` is that of
    `pallas_call`: True or `pltpu.InterpretParams` runs on any device, with tiles of any size.
    Raises NotImplementedError for other dtypes than bfloat16 and float32, for tiles that are
    no multiple of 128, and for tiles or lists that exceed the memory of a core.
    """
    for x in (q, k, v):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(
                f"attention=mosaic_tpu takes bfloat16 and float32, not {x.dtype}; "
                "attention=xla runs on any device"
            )
    if not isinstance(plan.lists, Tiles):
        raise ValueError("TPU kernels of attention walk a plan laid out in tiles, not in steps")
    if not interpret and any(side % LANES for side in plan.tile):
        raise NotImplementedError(f"tile={plan.tile} for a TPU: no multiple of {LANES}")
    # A TPU rounds float32 factors to bfloat16 unless told otherwise.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rule = Rule(scale, softcap, plan.windowed, precision)
    return _attend(q, k, v, jax.tree.map(jnp.asarray, plan), rule, interpret)


@partial(jax.custom_vjp, nondiff_argnames=("rule", "interpret"))
def _attend(q, k, v, plan, rule, interpret):
    return _forward(q, k, v, plan, rule, interpret)[0]


def _forward(q, k, v, plan, rule, interpret):
    size = Size.of(q, k, plan)
    keys, values = k.astype(q.dtype), v.astype(q.dtype)
    # A value that is not finite moves into the scores of its key, where the mask stops it.
    keys = by_key(jnp.where(is_sound(values), keys, jnp.nan), size)
    values = by_key(finite(values), size).swapaxes(1, 2)
    queries = by_query(q, size)
    a_row = (size.group, size.bq)
    o, lse = run_walk(
        partial(_kernel, rule=rule),
        "tree_attention_forward",
        Walk(plan.lists.rows, plan.lists.n_rows, plan.lists.row_start, axis=0),
        size,
        inputs=[
            *id_blocks(plan, size),
            (query_block(size), queries),
            (key_block(size), keys),
            (key_lanes_block(size), values),
        ],
        outputs=[
            (query_block(size), jax.ShapeDtypeStruct(queries.shape, q.dtype)),
            (row_block(size), jax.ShapeDtypeStruct((size.kv, size.group, size.t), jnp.float32)),
        ],
        scratch=[(size.group, size.d, size.bq), a_row, a_row],
        products=2,
        interpret=interpret,
    )
    o, lse = from_query(o, q.shape[0]), from_query(lse, q.shape[0])
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention")
    return (o, lse), (q, k, v, plan, o, lse)


def _kernel(pairs, starts, q_ids, k_ids, q, k, v, o, lse, acc, top, total, *, rule):
    """Blocks: q, o [G, D, bq]; k [bk, D]; v [D, bk]; lse [G, bq]."""
    group = q.shape[0]

    def begin():
        # `top` starts between LOW and any score, so that a key nobody sees weighs exactly 0.
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, LOW / 2)
        total[...] = jnp.zeros_like(total)

    def visit(masked):
        sees = visible(q_ids, k_ids, rule) if masked else None

        def finish(g, products):
            row = slice(g, g + 1)
            s, _ = scores(products, rule)
            if sees is not None:
                s = jnp.where(sees, s, LOW)
            old = top[row, :]
            new = jnp.maximum(old, jnp.max(s, axis=0, keepdims=True))
            p, keep = jnp.exp2(s - new), jnp.exp2(old - new)
            top[row, :] = new
            total[row, :] = total[row, :] * keep + jnp.sum(p, axis=0, keepdims=True)
            acc[g] = acc[g] * keep + dot(v[...], p.astype(v.dtype), (1, 0), rule)

        each_head(group, lambda g: dot(k[...], q[g], (1, 0), rule), finish)

    def end():
        for g in range(group):
            row = slice(g, g + 1)
            seen = total[row, :] != 0
            safe = jnp.where(seen, total[row, :], 1.0)
            o[g] = (acc[g] / safe).astype(o.dtype)
            lse[row, :] = jnp.where(seen, top[row, :] * LN2 + jnp.log(safe), -jnp.inf)

    each_pair(pairs, starts, 0, begin, visit, end)


def _backward(rule, interpret, saved, cotangent):
    return *gradients(saved, cotangent, rule, interpret), None


_attend.defvjp(_forward, _backward)
