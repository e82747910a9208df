"""Forward pass of prefix-tree attention on Hopper: one query tile of one head a block.

Padded queries, keys, values and the row lists of a plan flow in; outputs and log-sum-exps
flow out. A computing warpgroup has 64 queries and keeps their softmax in registers; the
tiles it meets are exactly those of ``rows[row_start[r]:row_start[r + 1]]``. Two of them take
turns: one multiplies while the other is at its exponents, after Shah et al. (arXiv 2407.08608).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_jax.attention.kernels import mosaic_gpu_parts as parts
from forge_jax.attention.kernels.mosaic_gpu_parts import LOG2E, ROWS, Ref, Ring, Setup, Value, along


class Lists(NamedTuple):
    """The ids and the lists that a kernel reads."""

    query_ids: jax.Array  # i32[2, T]: q_id, q_from
    key_ids: jax.Array  # i32[K, 3, S]: k_id, k_exit, and whether the key or value is not finite
    pairs: jax.Array  # i32[L], of `Tiles`: rows, or columns
    start: jax.Array  # i32[tiles + 1]


class Refs(NamedTuple):
    """The kernel's memory, in the order of its inputs, outputs and scratch."""

    q: Ref
    k: Ref
    v: Ref
    query_ids: Ref
    key_ids: Ref
    pairs: Ref
    start: Ref
    tainted: Ref
    o: Ref
    lse: Ref
    own_q: Ref  # [warpgroup, 64, D], and then the output
    own_ids: Ref  # [warpgroup, 2, 64]
    own_lse: Ref  # [warpgroup, 64]
    ring_k: Ref  # [stage, keys, D]
    ring_ids: Ref  # [stage, 3, keys]
    ring_v: Ref
    own_ready: Ref
    k_barriers: tuple[Ref, Ref]
    v_barriers: tuple[Ref, Ref]
    turns: Ref


def forward(
    setup: Setup,
    q: jax.Array,  # [T, H, D], in whole tiles
    k: jax.Array,  # [S, K, D], finite
    v: jax.Array,  # [S, K, D], finite
    lists: Lists,
    tainted: jax.Array,  # i32[1], whether any key or value was not finite
) -> tuple[jax.Array, jax.Array]:
    """(o [T, H, D], lse f32[H, T])."""
    (bq, bk), (tokens, heads, dim) = setup.tile, q.shape
    computing = bq // ROWS
    block = bk if dim <= 128 else min(bk, 64)  # keys a step: what the registers hold
    stages = setup.stages(kept_rows=bq, ring_rows=2 * block)
    return setup.launch(
        lambda *refs: _kernel(setup, stages, block, tokens // bq, Refs(*refs)),
        outputs=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, tokens), jnp.float32),
        ),
        scratch=(
            setup.shared(computing, ROWS),
            plgpu.SMEM((computing, 2, ROWS), jnp.int32),
            plgpu.SMEM((computing, ROWS), jnp.float32),
            setup.shared(stages, block),
            plgpu.SMEM((stages, 3, block), jnp.int32),
            setup.shared(stages, block),
            plgpu.Barrier(num_arrivals=2, num_barriers=computing),
            parts.barriers(stages, 2, computing),
            parts.barriers(stages, 1, computing),
            plgpu.Barrier(num_arrivals=computing),
        ),
        grid={"row": tokens // bq, "head": heads},
        computing=computing,
        name="tree_attention_forward",
    )(q, k, v, *lists, tainted)


def _kernel(setup: Setup, stages: int, block: int, rows: int, refs: Refs) -> None:
    row = rows - 1 - lax.axis_index("row")  # the longest lists first
    head = lax.axis_index("head")
    kv = lax.div(head, setup.group)
    steps, at = parts.row_walk(setup, refs.pairs, refs.start, row, block)
    rings = [Ring(stages, *refs.k_barriers), Ring(stages, *refs.v_barriers)]

    def copies(i):
        here, _ = at(i)
        keys = [(refs.k.at[here, kv], refs.ring_k), (refs.key_ids.at[kv, :, here], refs.ring_ids)]
        return [keys, [(refs.v.at[here, kv], refs.ring_v)]]

    def compute(index):
        mine = pl.ds(row * setup.tile[0] + index * ROWS, ROWS)
        own_q, own_lse = refs.own_q.at[index], refs.own_lse.at[index]
        own = [(refs.q.at[mine, head], own_q), (refs.query_ids.at[:, mine], refs.own_ids.at[index])]
        parts.fetch_own(own, refs.own_ready.at[index])
        acc, top, total = _attend(setup, refs, rings, index, steps, lambda i: at(i)[1])
        unseen = total == 0.0
        total = jnp.where(unseen, 1.0, total)
        own_q[...] = (acc / along(total, acc.shape, 0)).astype(setup.dtype)
        own_lse[...] = jnp.where(unseen, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
        parts.write((own_q, refs.o.at[mine, head]), (own_lse, refs.lse.at[head, mine]))

    computing = setup.tile[0] // ROWS
    parts.roles(computing, compute, lambda: parts.fetch(steps, rings, copies))


def _attend(
    setup: Setup,
    refs: Refs,
    rings: list[Ring],
    index: Value,
    steps: Value,
    masked: Callable[[Value], Value],
) -> tuple[Value, Value, Value]:
    """(weighted sum of values, maximum of scores, sum of weights) of one warpgroup's queries."""
    keys, values = rings
    arrive, wait = _turns(setup, refs.turns)
    anywhere = refs.tainted[0]

    def turn():
        arrive()
        wait()

    def step(i, carry):
        acc, top, total = carry
        mark = masked(i) | anywhere
        slot = keys.take(i)
        (raw,) = setup.products((refs.own_q.at[index], refs.ring_k.at[slot]), meanwhile=turn)
        x = setup.capped(raw)
        x = lax.cond(mark != 0, lambda x: _mask(setup, refs, index, slot, x), lambda x: x, x)
        keys.give(slot)
        p, keep, top, total = parts.online_softmax(x, setup.unit, top, total)
        kept, p = acc * along(keep, acc.shape, 0), p.astype(setup.dtype)
        # What ends with this turn is not to be put off beyond it.
        kept, p, top, total = lax.optimization_barrier((kept, p, top, total))
        arrive()
        slot = values.take(i)
        wait()
        (acc,) = setup.accumulate((kept, p, refs.ring_v.at[slot]))
        values.give(slot)
        return acc, top, total

    none = setup.zeros(ROWS, setup.head_dim), setup.per_row(parts.FLOOR), setup.per_row(0.0)
    pl.when(index == 1)(turn)
    found = lax.fori_loop(0, steps, step, none)
    pl.when(index == 0)(turn)
    return found


def _mask(setup: Setup, refs: Refs, index: Value, slot: Value, x: Value) -> Value:
    taint = along(setup.load(refs.ring_ids.at[slot, 2], 1), x.shape, 1)
    x = jnp.where(taint != 0, jnp.nan, x)
    sees = setup.sees(refs.own_ids.at[index], refs.ring_ids.at[slot], x.shape, query_axis=0)
    plgpu.commit_smem()
    return jnp.where(sees, x, parts.UNSEEN)


def _turns(setup: Setup, barrier: Ref) -> tuple[Any, Any]:
    """(arrive, wait) at the change of turns; nothing where a warpgroup is alone."""
    if setup.tile[0] // ROWS == 1:
        return (lambda: None), (lambda: None)
    return (lambda: plgpu.barrier_arrive(barrier)), (lambda: plgpu.barrier_wait(barrier))
