"""What the Hopper kernels of prefix-tree attention share: sizes, products, masks, scores.

A block of threads has one fetching warpgroup, which walks the list of tiles and copies by
TMA into rings of shared memory, and one computing warpgroup for each 64 rows of its tile.
Every value here is an array in registers, in the layout of a WGMMA accumulator or of its
rows or columns. Interpreted, products are plain ones and layouts mean nothing; lists, rings,
barriers and masks are the same code.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_jax.attention.tiles import unpack

ROWS = 64  # rows of an accumulator of one warpgroup
SHARED_BYTES = 227 * 1024 - 4096  # of a Hopper block, less barriers and scratch
STAGES = 3  # depth of a ring, where it fits
LOG2E = math.log2(math.e)
UNSEEN = -math.inf  # score of a key that a query does not see
FLOOR = -1e29  # where the maximum of a row starts, so that exp2(UNSEEN - maximum) is always 0

Value = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int  # a multiple of 32
    dtype: Any  # of the factors of products
    tile: tuple[int, int]  # of queries, of keys
    windowed: bool
    scale: float
    softcap: float | None
    interpret: Any  # False, or the interpreter's parameters

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def shared(self, *shape: int) -> Any:
        """Shared memory for rows of factors, laid out as WGMMA reads them."""
        swizzle = 128 if self.head_dim % 64 == 0 else 64
        transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM((*shape, self.head_dim), self.dtype, transforms=transforms)

    def stages(self, kept_rows: int, ring_rows: int) -> int:
        """Depth of a ring with `ring_rows` rows a stage, beside `kept_rows` that stay."""
        row = 2 * self.head_dim
        # Beside its factors a row has up to four vectors of ids and sums.
        spare = SHARED_BYTES - kept_rows * (row + 16)
        return min(STAGES, spare // (ring_rows * (row + 16)))

    def launch(
        self, body: Callable, *, outputs: Any, scratch: Any, grid: dict, computing: int, name: str
    ) -> Callable:
        """`body` as a kernel over `grid`: axis name to size, the last one fastest."""
        return plgpu.kernel(
            body,
            out_type=outputs,
            scratch_types=scratch,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=computing + 1,
            thread_name="warpgroup",
            kernel_name=name,
            interpret=self.interpret,
            # Approximate exp2, log2 and division: 2 ulp of float32.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
        )

    def products(
        self, *factors: tuple[Ref, Ref], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Value]:
        """``a @ bᵀ`` of pairs in shared memory: started, `meanwhile` called, and awaited."""
        if self.interpret:
            meanwhile()
            return [self._plain(a[...], b[...].T) for a, b in factors]

        def multiply(*sums):
            for total, (a, b) in zip(sums, factors, strict=True):
                plgpu.wgmma(total, a, b.transpose((1, 0)))
            meanwhile()
            return [total[...] for total in sums]

        shapes = [plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in factors]
        return pl.run_scoped(multiply, *shapes)

    def accumulate(self, *terms: tuple[Value, Value, Ref]) -> list[Value]:
        """``sum + a @ b`` of (sum, a, b), a in registers and b in shared memory; awaited."""
        if self.interpret:
            return [x + self._plain(a.astype(self.dtype), b[...]) for x, a, b in terms]

        def multiply(sums):
            for total, (_, a, b) in zip(sums, terms, strict=True):
                plgpu.wgmma(total, a.astype(self.dtype), b)

        return list(pl.run_state(multiply)([plgpu.ACC.init(x) for x, _, _ in terms]))

    def _plain(self, a: Value, b: Value) -> Value:
        plgpu.commit_smem()  # the interpreter takes these reads for ordinary ones
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    def zeros(self, rows: int, columns: int) -> Value:
        """An accumulator of zeros."""
        return self._laid(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)

    def per_row(self, value: float) -> Value:
        """`value` for each row of an accumulator."""
        return self._laid(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    def load(self, ref: Ref, axis: int) -> Value:
        """A vector in shared memory as the value of each row (axis 0) or column (1) of a
        product."""
        return self._laid(ref[...], plgpu.Layout.WGMMA.reduce(1 - axis))

    def _laid(self, x: Value, layout: Any) -> Value:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    @property
    def unit(self) -> float:
        """What turns `capped` scores into powers of 2. It waits for the exponent, where the
        product and the difference are one instruction."""
        return (self.scale if self.softcap is None else self.softcap) * LOG2E

    def capped(self, raw: Value) -> Value:
        """Raw products, or the tanh of their softcap."""
        return raw if self.softcap is None else tanh(raw * (self.scale / self.softcap))

    def score_gradient(self, p: Value, dp: Value, delta: Value, capped: Value) -> Value:
        """Gradient of scaled scores before their softcap, from weights and their gradients."""
        ds = p * (dp - delta)
        return ds if self.softcap is None else ds * (1.0 - capped * capped)

    def sees(self, queries: Ref, keys: Ref, shape: tuple, query_axis: int) -> Value:
        """bool `shape`: whether a query of `QueryIds` sees a key of `KeyIds`."""

        def ids(ref, row, axis):
            return along(self.load(ref.at[row], axis), shape, axis)

        q_id, k_id = ids(queries, 0, query_axis), ids(keys, 0, 1 - query_axis)
        inside = (k_id <= q_id) & (q_id < ids(keys, 1, 1 - query_axis))
        return inside & (ids(queries, 1, query_axis) <= k_id) if self.windowed else inside


def along(x: Value, shape: tuple, axis: int) -> Value:
    """`x` repeated to `shape`, its own axis being `axis`."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def tanh(x: Value) -> Value:
    """By exp2: the hardware's tanh is good to 11 bits only."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2E)) + 1.0)


def online_softmax(x: Value, unit: float, top: Value, total: Value) -> tuple[Value, ...]:
    """(weights, factor of what was summed before, maximum, sum) after scores `x` [Q, S] in
    the given unit; the maximum is in powers of 2."""
    new = jnp.maximum(top, jnp.max(x, axis=1) * unit)
    keep = jnp.exp2(top - new)
    p = jnp.exp2(x * unit - along(new, x.shape, 0))
    return p, keep, new, total * keep + jnp.sum(p, axis=1)


def split(i: Value, parts: int) -> tuple[Value, Value]:
    """(i // parts, i % parts)."""
    return (i, jnp.int32(0)) if parts == 1 else (lax.div(i, parts), lax.rem(i, parts))


class Ring:
    """Slots of shared memory that one warpgroup fills and others drain, in turn.

    A slot is filled again only when all that drain it are done with it, and the last
    round is awaited too: a barrier must not be left with a completion nobody saw.
    """

    def __init__(self, stages: int, ready: Ref, free: Ref):
        self.stages, self.ready, self.free = stages, ready, free

    def fill(self, i: Value, copies: list[tuple[Ref, Ref]]) -> None:
        """Starts `copies` (source, ring of destinations) into the slot of step `i`."""
        slot = lax.rem(i, self.stages)

        @pl.when(i >= self.stages)
        def _():
            plgpu.barrier_wait(self.free.at[slot])

        for source, ring in copies:
            plgpu.copy_gmem_to_smem(source, ring.at[slot], self.ready.at[slot])

    def drained(self, steps: Value) -> None:
        """Waits until all of `steps` fillings are drained."""
        for slot in range(self.stages):

            @pl.when(steps > slot)
            def _(slot=slot):
                plgpu.barrier_wait(self.free.at[slot])

    def take(self, i: Value) -> Value:
        """Waits for step `i` to be filled and returns its slot."""
        slot = lax.rem(i, self.stages)
        plgpu.barrier_wait(self.ready.at[slot])
        return slot

    def give(self, slot: Value) -> None:
        """Leaves a slot to be filled again. Whoever read it by `Setup.load`, and not by a
        product, calls `commit_smem` first: a copy is not ordered after such reads."""
        plgpu.barrier_arrive(self.free.at[slot])


def fetch(steps: Value, rings: list[Ring], copies: Callable[[Value], list]) -> None:
    """What the fetching warpgroup does: ``copies(i)`` says for each ring what step i takes."""

    def step(i, carry):
        for ring, sources in zip(rings, copies(i), strict=True):
            ring.fill(i, sources)
        return carry

    lax.fori_loop(0, steps, step, None)
    for ring in rings:
        ring.drained(steps)


def fetch_own(copies: list[tuple[Ref, Ref]], ready: Ref) -> None:
    """Copies what a computing warpgroup keeps, and waits for it."""
    for source, destination in copies:
        plgpu.copy_gmem_to_smem(source, destination, ready)
    plgpu.barrier_wait(ready)


def write(*copies: tuple[Ref, Ref]) -> None:
    """Copies shared memory that was just assigned to where it is to stay."""
    plgpu.commit_smem()
    for source, destination in copies:
        plgpu.copy_smem_to_gmem(source, destination)
    plgpu.wait_smem_to_gmem(0)


def row_walk(
    setup: Setup, pairs: Ref, start: Ref, row: Value, block: int
) -> tuple[Value, Callable[[Value], tuple[Any, Value]]]:
    """How many blocks of keys a query tile meets, and the (slice of keys, masked) of each."""
    keys = setup.tile[1]
    first = start[row]

    def at(i):
        pair, part = split(i, keys // block)
        _, column, masked = unpack(pairs[first + pair])
        return pl.ds(column * keys + part * block, block), masked

    return (start[row + 1] - first) * (keys // block), at


def barriers(stages: int, copies: int, computing: int) -> tuple:
    """(ready, free) of a ring."""
    return (
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    )


def roles(computing: int, compute: Callable[[Value], None], fetch: Callable[[], None]) -> None:
    """Sends a warpgroup to its work: `compute(index)`, or `fetch()` in the last one."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < computing)
    def _():
        if computing == 2:  # the registers that fetching can spare
            plgpu.set_max_registers(240, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == computing)
    def _():
        if computing == 2:
            plgpu.set_max_registers(24, action="decrease")
        fetch()
