"""What the three TPU kernels of tree attention share: layouts, blocks, the walk, scores, masks.

Arrays of the op flow in and tiled arrays flow out, and back. Queries lie along lanes and keys
along sublanes: scores are [keys, queries], so that what belongs to a query (ids, running
maximum, lse) is a row that broadcasts for free, a sum over keys adds whole registers, and a
head dim below 128 still fills the lanes of every query array.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from forge_jax.attention.plan import TilePlan
from forge_jax.attention.tiles import pack, unpack

LOG2E = 1.4426950408889634  # the kernels exponentiate in base 2
LANES, SUBLANES = 128, 8  # of a vector register
MIB = 2**20
VMEM = 60 * MIB  # vector memory a kernel may take; the smallest core, tpu7x's, has 64
SMEM = 1000 * 1024  # scalar memory the list of pairs may take; a core has 1 MiB


class Size(NamedTuple):
    """The static sizes of one call, padded to whole tiles."""

    kv: int  # key heads
    group: int  # query heads that a key head serves
    d: int  # head dim
    t: int  # queries
    s: int  # keys
    bq: int  # queries of a tile
    bk: int  # keys of a tile

    @classmethod
    def of(cls, q: Array, k: Array, plan: TilePlan) -> "Size":
        (_, heads, d), kv = q.shape, k.shape[1]
        return cls(kv, heads // kv, d, plan.q_id.shape[0], plan.k_id.shape[0], *plan.tile)


class Rule(NamedTuple):
    """What is computed inside a pair of tiles; static."""

    scale: float
    softcap: float | None
    windowed: bool
    precision: lax.Precision | None  # of products


class Walk(NamedTuple):
    """A list of pairs of tiles, and where each line of tiles begins in it."""

    pairs: Any  # i32[L]
    n: Any  # i32[], real pairs
    starts: Any  # i32[lines + 1]
    axis: int  # 0: a line is a row of tiles, 1: a column


Blocks = Sequence[tuple[pl.BlockSpec, Any]]  # with the array, or the shape of the output


def by_query(x: Array, size: Size) -> Array:
    """[T, H, D] to [K, G, D, T'], or [H, T] to [K, G, T']."""
    x = x.transpose(1, 2, 0) if x.ndim == 3 else x
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size.t - x.shape[-1])])
    return x.reshape(size.kv, size.group, *x.shape[1:])


def from_query(x: Array, tokens: int) -> Array:
    """The inverse of `by_query`."""
    x = x.reshape(-1, *x.shape[2:])[..., :tokens]
    return x.transpose(2, 0, 1) if x.ndim == 3 else x


def by_key(x: Array, size: Size) -> Array:
    """[S, K, D] to [K, S', D]."""
    return jnp.pad(x, [(0, size.s - x.shape[0]), (0, 0), (0, 0)]).transpose(1, 0, 2)


def finite(x: Array) -> Array:
    """`x` without its NaN and infinities, which would outlive a product with weight 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def is_sound(x: Array) -> Array:
    """[..., D] to [..., 1]: whether a head of a token is finite throughout."""
    return jnp.isfinite(x).all(axis=-1, keepdims=True)


def query_block(size: Size) -> pl.BlockSpec:
    """Of [K, G, D, T']."""
    shape = (None, size.group, size.d, size.bq)
    return pl.BlockSpec(shape, lambda h, n, pairs, _: (h, 0, 0, unpack(pairs[n])[0]))


def row_block(size: Size) -> pl.BlockSpec:
    """Of [K, G, T'], one number a query."""
    shape = (None, size.group, size.bq)
    return pl.BlockSpec(shape, lambda h, n, pairs, _: (h, 0, unpack(pairs[n])[0]))


def key_block(size: Size) -> pl.BlockSpec:
    """Of [K, S', D]."""
    shape = (None, size.bk, size.d)
    return pl.BlockSpec(shape, lambda h, n, pairs, _: (h, unpack(pairs[n])[1], 0))


def key_lanes_block(size: Size) -> pl.BlockSpec:
    """Of [K, D, S'], keys along lanes."""
    shape = (None, size.d, size.bk)
    return pl.BlockSpec(shape, lambda h, n, pairs, _: (h, 0, unpack(pairs[n])[1]))


def id_blocks(plan: TilePlan, size: Size) -> Blocks:
    """The first two inputs of a kernel: i32[2, T'] ids and windows, i32[2, S'] ids and exits."""
    queries = pl.BlockSpec((2, size.bq), lambda h, n, pairs, _: (0, unpack(pairs[n])[0]))
    keys = pl.BlockSpec((2, size.bk), lambda h, n, pairs, _: (0, unpack(pairs[n])[1]))
    return [
        (queries, jnp.stack([plan.q_id, plan.q_from])),
        (keys, jnp.stack([plan.k_id, plan.k_exit])),
    ]


def visible(q_ids: Any, k_ids: Any, rule: Rule) -> Array:
    """bool[bk, bq] of a pair of tiles."""
    keys = k_ids[...].T
    k_id, k_exit = keys[:, 0:1], keys[:, 1:2]
    q_id = q_ids[0:1, :]
    sees = (k_id <= q_id) & (q_id < k_exit)
    return sees & (q_ids[1:2, :] <= k_id) if rule.windowed else sees


def scores(products: Array, rule: Rule) -> tuple[Array, Array | None]:
    """Scores in base 2 of products of keys and queries, and what a cap leaves of their slope."""
    if rule.softcap is None:
        return products * (rule.scale * LOG2E), None
    tanh = jnp.tanh(products * (rule.scale / rule.softcap))
    return tanh * (rule.softcap * LOG2E), 1 - tanh * tanh


def dot(a: Array, b: Array, axes: tuple[int, int], rule: Rule) -> Array:
    """Sums axis axes[0] of `a` with axis axes[1] of `b`, in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=rule.precision, preferred_element_type=jnp.float32)


def each_pair(
    pairs: Any, starts: Any, axis: int, begin: Callable, visit: Callable, end: Callable
) -> None:
    """The body of a grid step; `axis` as in `Walk`.

    ``begin()`` runs at the first pair of a line, ``visit(masked)`` at every pair, ``end()``
    at the last one.
    """
    n = pl.program_id(1)
    *tiles, masked = unpack(pairs[n])
    line = tiles[axis]
    pl.when(n == starts[line])(begin)
    pl.when(masked == 0)(partial(visit, False))
    pl.when(masked == 1)(partial(visit, True))
    pl.when(n + 1 == starts[line + 1])(end)


def each_head(heads: int, products: Callable, finish: Callable) -> None:
    """Runs ``finish(g, products(g))`` for every query head g of a pair.

    The products of a head are issued before the finish of the head before it, so that the
    matrix unit works while exponentials are taken.
    """
    ahead = products(0)
    for g in range(heads):
        now, ahead = ahead, products(g + 1) if g + 1 < heads else None
        finish(g, now)


def run_walk(
    kernel: Callable,
    name: str,
    walk: Walk,
    size: Size,
    *,
    inputs: Blocks,
    outputs: Blocks,
    scratch: Sequence[tuple[int, ...]],
    products: int,
    interpret: Any,
) -> Any:
    """Runs `kernel` once a key head and live pair; `scratch` are shapes of float32 in VMEM.

    `products` counts the matrix products of a pair and head.
    """
    once = sum(map(_block_bytes, [*inputs, *outputs]))
    # Blocks have two buffers each, and a few arrays of scores are under way.
    vmem = 2 * once + sum(_padded_bytes(shape, 4) for shape in [*scratch, *6 * [size[-2:]]])
    if not interpret:
        _check_memory(vmem, 4 * (walk.pairs.shape[0] + walk.starts.shape[0]), size)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(size.kv, walk.n),
            in_specs=[spec for spec, _ in inputs],
            out_specs=[spec for spec, _ in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for _, shape in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(vmem + 2 * MIB, 16 * MIB),
        ),
        cost_estimate=_cost(walk, size, products, [*inputs, *outputs]),
        interpret=interpret,
        name=name,
    )(walk.pairs, walk.starts, *[x for _, x in inputs])


def _cost(walk: Walk, size: Size, products: int, blocks: Blocks) -> pl.CostEstimate:
    """What the listed pairs cost, for the shapes alone are known: an upper bound, by the padding
    of the list, of which nothing runs. The tanh of a cap counts."""
    pairs, lines = walk.pairs.shape[0], walk.starts.shape[0] - 1
    steps, area = size.kv * pairs, size.group * size.bq * size.bk
    fetches = [pairs if _moves(spec, walk.axis) else lines for spec, _ in blocks]
    traffic = sum(n * _block_bytes(block) for n, block in zip(fetches, blocks, strict=True))
    return pl.CostEstimate(
        flops=2 * products * size.d * area * steps,
        transcendentals=2 * area * steps,
        bytes_accessed=size.kv * traffic,
    )


def _moves(spec: pl.BlockSpec, axis: int) -> bool:
    """Whether a block changes from pair to pair of a line; where not, it is moved once a line."""
    assert spec.index_map is not None
    pairs = [[pack(0, 0, 0)], [pack(0, 1, 0) if axis == 0 else pack(1, 0, 0)]]
    first, second = (spec.index_map(0, 0, pair, None) for pair in pairs)
    return first != second


def _padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """What an array takes in VMEM, where its last two axes fill whole registers."""
    *outer, rows, columns = shape
    rows, columns = -(-rows // SUBLANES) * SUBLANES, -(-columns // LANES) * LANES
    return math.prod(outer) * rows * columns * itemsize


def _block_bytes(block: tuple[pl.BlockSpec, Any]) -> int:
    spec, array = block
    shape = [side for side in spec.block_shape or () if isinstance(side, int)]
    return _padded_bytes(shape, array.dtype.itemsize)


def _check_memory(vmem: int, smem: int, size: Size) -> None:
    tile = f"tiles of {size.bq} queries x {size.bk} keys"
    if vmem > VMEM:
        raise NotImplementedError(
            f"{tile} for {size.group} query heads of {size.d} to a key head take"
            f" {vmem / MIB:.0f} MiB of vector memory, of {VMEM // MIB}: use smaller tiles"
        )
    if smem > SMEM:
        raise NotImplementedError(
            f"the list of pairs of {tile} takes {smem} bytes of scalar memory, of {SMEM}:"
            " use larger tiles"
        )
