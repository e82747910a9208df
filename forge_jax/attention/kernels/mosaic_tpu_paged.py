"""Attention over keys and values in pages as a Pallas kernel for TPU (Mosaic).

Queries, pages and the tables of rows flow in; outputs and log-sum-exps flow out. A grid step is
one row. Pages stay in HBM: the table, in scalar memory, says which to copy, each with all its kv
heads in one piece, several at a time into one of two buffers, the next while those before are
worked on. Pages beyond the last that a row sees are neither copied nor computed. All queries of
a kv head, of a window or of a whole bundle of rows, are one operand of a product.

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

BUFFER = 2 << 20  # bytes of keys that are copied at a time, at most
KEYS = 512  # and tokens of them
MIB = 2**20
VMEM = 60 * MIB  # vector memory a call may take; the smallest core, tpu7x's, has 64
SMEM = 960 * 1024  # scalar memory of tables; a core has 1 MiB
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
    other dtypes than bfloat16 and float32, for pages that do not fill registers, and for
    calls that exceed the memory of a core.
    """
    rows, queries, heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    group = heads // kv_heads
    size = group * queries
    bytes_ = keys.dtype.itemsize
    several = max(1, min(KEYS, BUFFER // (kv_heads * dim * bytes_)) // page)
    several = min(several, table.shape[1])
    vmem = _vmem(kv_heads, size, dim, several * page, bytes_)
    _check(keys, table, vmem, interpret)
    grouped = q.astype(keys.dtype).reshape(rows, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, size, dim)
    last = jnp.minimum(last, table.shape[1] * page - 1)
    seen = jnp.tile(last, (1, group))[..., None]  # [B, G T, 1]
    most = jnp.max(last, axis=1, initial=-1)
    of_row = pl.BlockSpec((None, kv_heads, size, dim), lambda b, *_: (b, 0, 0, 0))
    numbers = pl.BlockSpec((None, kv_heads, size, 1), lambda b, *_: (b, 0, 0, 0))
    buffer = pltpu.VMEM((2, several, kv_heads, page, dim), keys.dtype)
    o, lse = pl.pallas_call(
        partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[
                of_row,
                pl.BlockSpec((None, size, 1), lambda b, *_: (b, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[of_row, numbers],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((kv_heads, size, dim), jnp.float32),
                pltpu.VMEM((kv_heads, size, 1), jnp.float32),
                pltpu.VMEM((kv_heads, size, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, kv_heads, size, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, size, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=max(vmem + 2 * MIB, 16 * MIB)
        ),
        cost_estimate=_cost(rows, kv_heads, size, dim, table.shape[1] * page, bytes_),
        name="paged_attention",
        interpret=interpret,
    )(table, most, grouped, seen, keys, values)

    def by_query(x: Array) -> Array:
        apart = x.reshape(rows, kv_heads, group, queries, -1).transpose(0, 3, 1, 2, 4)
        return apart.reshape(rows, queries, heads, -1)

    return by_query(o), by_query(lse)[..., 0]


def _kernel(
    table, most, q, seen, keys, values, o, lse, k_buffer, v_buffer, done, acc, top, total, *, scale
):
    """Blocks: q, o [K, G T, D]; seen [G T, 1]; lse [K, G T, 1]; buffers [2, pages, K, page, D]."""
    row = pl.program_id(0)
    _, several, kv_heads, page, _ = k_buffer.shape
    pages = lax.div(most[row] + page, page)  # that somebody sees
    # `top` starts between LOW and any score, so that a key nobody sees weighs exactly 0.
    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, LOW / 2)
    total[...] = jnp.zeros_like(total)

    def each_copy(turn: Any, act: Any) -> None:
        """The copies of a turn; behind the last page that is seen it is copied again."""
        side = lax.rem(turn, 2)
        for i in range(several):
            index = table[row, jnp.minimum(turn * several + i, pages - 1)]
            for kind, source, buffer in ((0, keys, k_buffer), (1, values, v_buffer)):
                act(
                    pltpu.make_async_copy(source.at[index], buffer.at[side, i], done.at[kind, side])
                )

    def start(turn: Any) -> None:
        each_copy(turn, lambda copy: copy.start())

    pl.when(pages > 0)(partial(start, 0))
    turns = lax.div(pages + several - 1, several)

    def turn(n: Any, _: None) -> None:
        pl.when(n + 1 < turns)(partial(start, n + 1))
        each_copy(n, lambda copy: copy.wait())
        first, side = n * several * page, lax.rem(n, 2)
        for head in range(kv_heads):
            state = (head, acc, top, total)
            _visit(q, seen, k_buffer.at[side], v_buffer.at[side], first, state, scale)

    lax.fori_loop(0, turns, turn, None)
    whole = total[...]
    some = whole > 0
    safe = jnp.where(some, whole, 1)
    o[...] = acc[...] / safe
    lse[...] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


def _visit(q, seen, keys, values, first, state, scale):
    """One kv head of the pages in a buffer, whose first token is at position `first`."""
    head, acc, top, total = state
    dim = q.shape[-1]
    k = keys[:, head].reshape(-1, dim)
    v = values[:, head].reshape(-1, dim)
    # A TPU rounds float32 factors to bfloat16 unless told otherwise.
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    s = dot(q[head], k, (((1,), (1,)), ((), ()))) * scale
    position = first + lax.broadcasted_iota(jnp.int32, s.shape, 1)
    s = jnp.where(position <= seen[...], s, LOW)
    old = top[head]
    new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
    p, keep = jnp.exp(s - new), jnp.exp(old - new)
    top[head] = new
    total[head] = total[head] * keep + jnp.sum(p, axis=1, keepdims=True)
    acc[head] = acc[head] * keep + dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))


def _vmem(kv_heads: int, size: int, dim: int, tokens: int, bytes_: int) -> int:
    """Two buffers of keys and of values, two of each block, sums, and a head's scores."""
    lanes = -(-dim // 128) * 128
    queries = kv_heads * (-(-size // 8) * 8)
    of_queries = queries * (lanes * (2 * bytes_ + 3 * 4) + 4 * 128 * 4) + 2 * size * 128 * 4
    return 4 * kv_heads * tokens * lanes * bytes_ + of_queries + 6 * size * tokens * 4


def _check(keys: Array, table: Array, vmem: int, interpret: Any) -> None:
    page, (rows, columns) = keys.shape[2], table.shape
    if keys.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"attention=pallas takes bfloat16 and float32 pages, not {keys.dtype}; "
            "attention=xla takes any"
        )
    sublanes = 32 // keys.dtype.itemsize
    if page % sublanes:
        raise NotImplementedError(
            f"page={page} of {keys.dtype} for attention=pallas: no multiple of {sublanes};"
            " attention=xla takes any"
        )
    if interpret:
        return
    tables = 4 * rows * (-(-columns // 128) * 128)
    if tables > SMEM:
        raise NotImplementedError(
            f"tables of {rows} x {columns} pages take {tables} bytes of scalar memory, of {SMEM}:"
            " use larger pages"
        )
    if vmem > VMEM:
        raise NotImplementedError(
            f"attention=pallas takes {vmem / MIB:.0f} MiB of vector memory, of {VMEM // MIB}:"
            " use fewer queries a row"
        )


def _cost(
    rows: int, kv_heads: int, size: int, dim: int, context: int, bytes_: int
) -> pl.CostEstimate:
    """Of tables that are full: an upper bound, for the shapes alone are known."""
    area = rows * kv_heads * size * context
    moved = 2 * rows * kv_heads * context * dim * bytes_
    queries = rows * kv_heads * size * dim * (bytes_ + 4)
    return pl.CostEstimate(
        flops=4 * dim * area, transcendentals=area, bytes_accessed=moved + queries
    )
