"""The backward kernels of prefix-tree attention for TPU: dq by rows, dk and dv by columns.

What the forward pass saved and the cotangents of its two results flow in; gradients flow
out. With ``p = exp(s - lse)`` and ``delta = Σ do o - dlse``: ``dv = pᵀ do``,
``ds = p (do vᵀ - delta)``, ``dq = ds k``, ``dk = dsᵀ q``, the last two times the scale.
Every block of an output is written once, at the last pair of its line of tiles.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from forge_jax.attention.kernels.mosaic_tpu_blocks import (
    LOG2E,
    Blocks,
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


def gradients(
    saved: tuple, cotangent: tuple, rule: Rule, interpret: Any
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the dtypes of q, k and v; `saved` is (q, k, v, plan, o, lse) and
    `cotangent` (do, dlse)."""
    q, k, v, plan, *_ = saved
    size = Size.of(q, k, plan)
    keys, values = (by_key(finite(x.astype(q.dtype)), size) for x in (k, v))
    inputs = [
        *id_blocks(plan, size),
        *_query_blocks(saved, cotangent, size),
        (key_block(size), keys),
        (key_block(size), values),
    ]
    of_queries = jax.ShapeDtypeStruct((size.kv, size.group, size.d, size.t), q.dtype)
    of_keys = [jax.ShapeDtypeStruct((size.kv, size.d, size.s), x.dtype) for x in (k, v)]
    (dq,) = run_walk(
        partial(_dq_kernel, rule=rule),
        "tree_attention_dq",
        Walk(plan.lists.rows, plan.lists.n_rows, plan.lists.row_start, axis=0),
        size,
        inputs=[*inputs, (key_lanes_block(size), keys.swapaxes(1, 2))],
        outputs=[(query_block(size), of_queries)],
        scratch=[(size.group, size.d, size.bq)],
        products=3,
        interpret=interpret,
    )
    dk, dv = run_walk(
        partial(_dkv_kernel, rule=rule),
        "tree_attention_dkv",
        Walk(plan.lists.columns, plan.lists.n_columns, plan.lists.column_start, axis=1),
        size,
        inputs=inputs,
        outputs=[(key_lanes_block(size), shape) for shape in of_keys],
        scratch=[(size.d, size.bk)] * 2,
        products=4,
        interpret=interpret,
    )
    dk, dv = (x.transpose(2, 0, 1)[: k.shape[0]] for x in (dk, dv))
    return from_query(dq, q.shape[0]), dk, dv


def _query_blocks(saved: tuple, cotangent: tuple, size: Size) -> Blocks:
    """q, do, lse in base 2, and delta.

    What is not finite in q has made its lse so; in do it moves there: into the weights of
    its own query, where the mask stops it.
    """
    q, _, _, _, o, lse = saved
    do, dlse = cotangent
    seen = ~jnp.isneginf(lse)
    delta = jnp.einsum("thd,thd->ht", do.astype(jnp.float32), o.astype(jnp.float32))
    delta = delta - jnp.where(seen, dlse, 0)
    lse = jnp.where(is_sound(do)[..., 0].T, jnp.where(seen, lse, 0), jnp.nan)
    return [
        (query_block(size), by_query(finite(q), size)),
        (query_block(size), by_query(finite(do), size)),
        (row_block(size), by_query(lse * LOG2E, size)),
        (row_block(size), by_query(delta, size)),
    ]


def _products(q, do, k, v, rule, g):
    """Of the keys with the queries and of the values with the cotangents of head g, [bk, bq]."""
    return dot(k[...], q[g], (1, 0), rule), dot(v[...], do[g], (1, 0), rule)


def _weights(g, products, sees, lse, delta, rule):
    """(p, ds) of query head g, f32[bk, bq]."""
    row = slice(g, g + 1)
    s, slope = scores(products[0], rule)
    p = jnp.exp2(s - lse[row, :])
    ds = p * (products[1] - delta[row, :])
    if slope is not None:
        ds = ds * slope
    if sees is not None:
        p, ds = jnp.where(sees, p, 0.0), jnp.where(sees, ds, 0.0)
    return p, ds


def _dq_kernel(pairs, starts, q_ids, k_ids, q, do, lse, delta, k, v, k_lanes, dq, acc, *, rule):
    """Blocks: q, do, dq [G, D, bq]; lse, delta [G, bq]; k, v [bk, D]; k_lanes [D, bk]."""

    def begin():
        acc[...] = jnp.zeros_like(acc)

    def visit(masked):
        sees = visible(q_ids, k_ids, rule) if masked else None

        def finish(g, products):
            _, ds = _weights(g, products, sees, lse, delta, rule)
            acc[g] += dot(k_lanes[...], ds.astype(k.dtype), (1, 0), rule)

        each_head(q.shape[0], partial(_products, q, do, k, v, rule), finish)

    def end():
        dq[...] = (acc[...] * rule.scale).astype(dq.dtype)

    each_pair(pairs, starts, 0, begin, visit, end)


def _dkv_kernel(
    pairs, starts, q_ids, k_ids, q, do, lse, delta, k, v, dk, dv, dk_acc, dv_acc, *, rule
):
    """Blocks: q, do [G, D, bq]; lse, delta [G, bq]; k, v [bk, D]; dk, dv [D, bk].

    Keys lie along the lanes of what is summed: a product has D rows then, not bk rows of D,
    which leave half of a 256-wide matrix unit idle.
    """

    def begin():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def visit(masked):
        sees = visible(q_ids, k_ids, rule) if masked else None

        def finish(g, products):
            p, ds = _weights(g, products, sees, lse, delta, rule)
            dv_acc[...] += dot(do[g], p.astype(do.dtype), (1, 1), rule)
            dk_acc[...] += dot(q[g], ds.astype(q.dtype), (1, 1), rule)

        each_head(q.shape[0], partial(_products, q, do, k, v, rule), finish)

    def end():
        dk[...] = (dk_acc[...] * rule.scale).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)

    each_pair(pairs, starts, 1, begin, visit, end)
