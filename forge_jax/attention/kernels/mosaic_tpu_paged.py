"""Attention over keys and values in pages as a Pallas kernel for TPU (Mosaic).

Queries, pages and the tables of rows flow in; outputs and log-sum-exps flow out. A grid step is
a few pages of one row and kv head, each fetched by its own double-buffered copy, whose source
the table in scalar memory names; pages beyond the last that a row sees are neither fetched nor
computed. All queries of a kv head, of a window or of a whole bundle of rows, share a step.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867); pages in tables after Kwon et
al. (arXiv 2309.06180).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

KEYS = 256  # of a grid step, about: so many rows keep a matrix unit busy while pages come
LOW = float(jnp.finfo(jnp.float32).min)  # stands for the score of a key that is not seen


def attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "P K page D"],
    values: Float[Array, "P K page D"],
    table: Int[Array, "B C"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `forge_jax.attention.paged.paged_attention`; the output is float32.

    Products are of the pages' dtype, sums and softmax float32. Raises NotImplementedError for
    other dtypes than bfloat16 and float32 and for pages that are no multiple of 8 tokens.
    """
    if keys.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"attention=pallas takes bfloat16 and float32 pages, not {keys.dtype}; "
            "attention=xla takes any"
        )
    rows, queries, heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    if page % 8:
        raise NotImplementedError(f"page={page} for a TPU: no multiple of 8")
    group = heads // kv_heads
    size = group * queries
    several = max(1, min(KEYS // page, table.shape[1]))  # pages of a step
    steps = -(-table.shape[1] // several)
    table = jnp.pad(table, ((0, 0), (0, steps * several - table.shape[1])))
    grouped = q.astype(keys.dtype).reshape(rows, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, size, dim)
    seen = jnp.tile(last, (1, group))[..., None]  # [B, G T, 1]
    o, lse = pl.pallas_call(
        partial(_kernel, scale=scale, several=several, page=page, steps=steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, size, dim), lambda b, k, s, *_: (b, k, 0, 0)),
                pl.BlockSpec((1, size, 1), lambda b, k, s, *_: (b, 0, 0)),
                *(_page_block(i, several, page, dim) for _ in "kv" for i in range(several)),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, size, dim), lambda b, k, s, *_: (b, k, 0, 0)),
                pl.BlockSpec((1, 1, size, 1), lambda b, k, s, *_: (b, k, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((size, dim), jnp.float32),
                pltpu.VMEM((size, 1), jnp.float32),
                pltpu.VMEM((size, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, kv_heads, size, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, size, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(rows, kv_heads, size, dim, steps * several * page, keys.dtype),
        name="paged_attention",
        interpret=interpret,
    )(table, jnp.max(last, axis=1), grouped, seen, *[keys] * several, *[values] * several)

    def by_query(x: Array) -> Array:
        apart = x.reshape(rows, kv_heads, group, queries, -1).transpose(0, 3, 1, 2, 4)
        return apart.reshape(rows, queries, heads, -1)

    return by_query(o), by_query(lse)[..., 0]


def _page_block(index: int, several: int, page: int, dim: int) -> pl.BlockSpec:
    """Page `index` of each step. Behind a row's last page it stays at that, which is not fetched
    again."""

    def at(b: Any, k: Any, s: Any, table: Any, most: Any) -> tuple[Any, ...]:
        final = lax.div(jnp.maximum(most[b], 0), page)
        return table[b, jnp.minimum(s * several + index, final)], k, 0, 0

    return pl.BlockSpec((1, 1, page, dim), at)


def _kernel(table, most, q, seen, *refs, scale, several, page, steps):
    """Blocks: q, o [1, 1, G T, D]; seen [1, G T, 1]; pages [1, 1, page, D]; lse [1, 1, G T, 1]."""
    keys, values = refs[:several], refs[several : 2 * several]
    o, lse, acc, top, total = refs[2 * several :]
    step = pl.program_id(2)
    first = step * several * page

    @pl.when(step == 0)
    def _():
        # `top` starts between LOW and any score, so that a key nobody sees weighs exactly 0.
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, LOW / 2)
        total[...] = jnp.zeros_like(total)

    @pl.when(first <= most[pl.program_id(0)])
    def _():
        k = jnp.concatenate([ref[0, 0] for ref in keys], axis=0)
        v = jnp.concatenate([ref[0, 0] for ref in values], axis=0)
        # A TPU rounds float32 factors to bfloat16 unless told otherwise.
        precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
        dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        s = dot(q[0, 0], k, (((1,), (1,)), ((), ()))) * scale
        position = first + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        s = jnp.where(position <= seen[0], s, LOW)
        old = top[...]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        p, keep = jnp.exp(s - new), jnp.exp(old - new)
        top[...] = new
        total[...] = total[...] * keep + jnp.sum(p, axis=1, keepdims=True)
        acc[...] = acc[...] * keep + dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))

    @pl.when(step == steps - 1)
    def _():
        whole = total[...]
        some = whole > 0
        o[0, 0] = acc[...] / jnp.where(some, whole, 1)
        lse[0, 0] = jnp.where(some, top[...] + jnp.log(jnp.where(some, whole, 1)), -jnp.inf)


def _cost(
    rows: int, kv_heads: int, size: int, dim: int, context: int, dtype: Any
) -> pl.CostEstimate:
    """Of tables that are full: an upper bound, for the shapes alone are known."""
    area = rows * kv_heads * size * context
    moved = 2 * rows * kv_heads * context * dim * jnp.dtype(dtype).itemsize
    queries = rows * kv_heads * size * dim * (jnp.dtype(dtype).itemsize + 4)
    return pl.CostEstimate(
        flops=4 * dim * area, transcendentals=area, bytes_accessed=moved + queries
    )
