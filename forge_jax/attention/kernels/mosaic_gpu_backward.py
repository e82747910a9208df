"""Backward pass of prefix-tree attention on Hopper: dq by query tile, dk and dv by key tile.

With ``p = exp(s - lse)`` and ``delta = Σ do o - dlse``: ``dv = pᵀ do``,
``ds = p (do vᵀ - delta)``, ``dq = scale ds k``, ``dk = scale dsᵀ q``. Both kernels compute
s anew; the second holds it transposed, so that each weight is already where its product
wants it. A key tile takes all query heads of its key head in turn, and needs no second sum.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_jax.attention.kernels import mosaic_gpu_parts as parts
from forge_jax.attention.kernels.mosaic_gpu_forward import Lists
from forge_jax.attention.kernels.mosaic_gpu_parts import ROWS, Ref, Ring, Setup, Value, along
from forge_jax.attention.tiles import unpack

BLOCK = 64  # of keys or queries a step


class Inputs(NamedTuple):
    """What both kernels read, in whole tiles and finite where it meets an unseen pair."""

    q: jax.Array  # [T, H, D]
    k: jax.Array  # [S, K, D]
    v: jax.Array  # [S, K, D]
    do: jax.Array  # [T, H, D]
    sums: jax.Array  # f32[H, 2, T]: lse in powers of 2, delta


class Given(NamedTuple):
    """`Inputs` and `Lists` in a kernel."""

    q: Ref
    k: Ref
    v: Ref
    do: Ref
    sums: Ref
    query_ids: Ref
    key_ids: Ref
    pairs: Ref
    start: Ref


class Scratch(NamedTuple):
    """Shared memory of a kernel: rows and columns of scores are queries in one kernel and keys
    in the other."""

    row_a: Ref  # [warpgroup, 64, D]: q, or k
    row_b: Ref  # do, or v
    ring_a: Ref  # [stage, 64, D]: k, or q
    ring_b: Ref  # v, or do
    query_ids: Ref  # [warpgroup or stage, 2, 64]
    key_ids: Ref  # [stage or warpgroup, 3, 64]
    sums: Ref  # [warpgroup or stage, 2, 64]: lse, delta
    own_ready: Ref
    a_barriers: tuple[Ref, Ref]
    b_barriers: tuple[Ref, Ref]


def query_gradient(setup: Setup, inputs: Inputs, lists: Lists) -> jax.Array:
    """dq [T, H, D] in the dtype of q; `lists` are of rows."""
    q, bq = inputs.q, setup.tile[0]
    tokens, heads, _ = q.shape
    computing = bq // ROWS
    stages = setup.stages(kept_rows=2 * bq, ring_rows=2 * BLOCK)

    def kernel(*refs):
        given, dq, shared = Given(*refs[:9]), refs[9], Scratch(*refs[10:])
        _query_kernel(setup, stages, tokens // bq, given, dq, shared)

    return setup.launch(
        kernel,
        outputs=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=_scratch(setup, stages, computing, own=4, filled=2, rows_are_queries=True),
        grid={"row": tokens // bq, "head": heads},
        computing=computing,
        name="tree_attention_dq",
    )(*inputs, *lists)


def key_gradients(
    setup: Setup, inputs: Inputs, lists: Lists, wanted: str = "kv"
) -> dict[str, jax.Array]:
    """float32 dk and dv [S, K, D] by name; `lists` are of columns.

    Both at once while the registers hold two sums of [64, D]; else one at a time.
    """
    bk, (keys, kv_heads, dim) = setup.tile[1], inputs.k.shape
    if dim > 128 and len(wanted) > 1:
        each = [key_gradients(setup, inputs, lists, name) for name in wanted]
        return each[0] | each[1]
    computing = bk // ROWS
    stages = setup.stages(kept_rows=2 * bk, ring_rows=2 * BLOCK)

    def kernel(*refs):
        given, rest = Given(*refs[:9]), refs[9:]
        outputs = dict(zip(wanted, rest, strict=False))
        _key_kernel(setup, stages, given, outputs, Scratch(*rest[len(wanted) :]))

    made = setup.launch(
        kernel,
        outputs=tuple(jax.ShapeDtypeStruct(inputs.k.shape, jnp.float32) for _ in wanted),
        scratch=_scratch(setup, stages, computing, own=3, filled=3, rows_are_queries=False),
        grid={"column": keys // bk, "head": kv_heads},
        computing=computing,
        name=f"tree_attention_d{wanted}",
    )(*inputs, *lists)
    return dict(zip(wanted, made, strict=True))


def _scratch(
    setup: Setup, stages: int, computing: int, own: int, filled: int, rows_are_queries: bool
) -> Scratch:
    """`own` copies make a warpgroup's rows ready, and `filled` copies a slot of the first ring."""
    queries, keys = (computing, stages) if rows_are_queries else (stages, computing)
    return Scratch(
        row_a=setup.shared(computing, ROWS),
        row_b=setup.shared(computing, ROWS),
        ring_a=setup.shared(stages, BLOCK),
        ring_b=setup.shared(stages, BLOCK),
        query_ids=plgpu.SMEM((queries, 2, 64), jnp.int32),
        key_ids=plgpu.SMEM((keys, 3, 64), jnp.int32),
        sums=plgpu.SMEM((queries, 2, 64), jnp.float32),
        own_ready=plgpu.Barrier(num_arrivals=own, num_barriers=computing),
        a_barriers=parts.barriers(stages, filled, computing),
        b_barriers=parts.barriers(stages, 1, computing),
    )


def _query_kernel(
    setup: Setup, stages: int, rows: int, given: Given, out: Ref, shared: Scratch
) -> None:
    row = rows - 1 - lax.axis_index("row")  # the longest lists first
    head = lax.axis_index("head")
    kv = lax.div(head, setup.group)
    steps, at = parts.row_walk(setup, given.pairs, given.start, row, BLOCK)
    keys, values = rings = [Ring(stages, *shared.a_barriers), Ring(stages, *shared.b_barriers)]

    def copies(i):
        here, _ = at(i)
        of_keys = [
            (given.k.at[here, kv], shared.ring_a),
            (given.key_ids.at[kv, :, here], shared.key_ids),
        ]
        return [of_keys, [(given.v.at[here, kv], shared.ring_b)]]

    def compute(index):
        mine = pl.ds(row * setup.tile[0] + index * ROWS, ROWS)
        q, do, sums = shared.row_a.at[index], shared.row_b.at[index], shared.sums.at[index]
        own = [
            (given.q.at[mine, head], q),
            (given.do.at[mine, head], do),
            (given.sums.at[head, :, mine], sums),
            (given.query_ids.at[:, mine], shared.query_ids.at[index]),
        ]
        parts.fetch_own(own, shared.own_ready.at[index])
        lse, delta = (setup.load(sums.at[n], 0) for n in range(2))

        def step(i, dq):
            slot = keys.take(i)
            values.take(i)
            k = shared.ring_a.at[slot]
            raw, dp = setup.products((q, k), (do, shared.ring_b.at[slot]))
            values.give(slot)
            x = setup.capped(raw)
            p = jnp.exp2(x * setup.unit - along(lse, x.shape, 0))
            ds = setup.score_gradient(p, dp, along(delta, p.shape, 0), x)
            ds = _masked(setup, at(i)[1], shared, (index, slot), ds, query_axis=0)
            (dq,) = setup.accumulate((dq, ds, k))
            keys.give(slot)
            return dq

        dq = lax.fori_loop(0, steps, step, setup.zeros(ROWS, setup.head_dim))
        q[...] = (dq * setup.scale).astype(setup.dtype)
        parts.write((q, out.at[mine, head]))

    computing = setup.tile[0] // ROWS
    parts.roles(computing, compute, lambda: parts.fetch(steps, rings, copies))


def _key_kernel(
    setup: Setup, stages: int, given: Given, outputs: dict[str, Ref], shared: Scratch
) -> None:
    column, kv = lax.axis_index("column"), lax.axis_index("head")
    steps, at = _column_walk(setup, given, column, kv)
    rings = [Ring(stages, *shared.a_barriers), Ring(stages, *shared.b_barriers)]

    def copies(i):
        here, head, _ = at(i)
        of_queries = [
            (given.q.at[here, head], shared.ring_a),
            (given.sums.at[head, :, here], shared.sums),
            (given.query_ids.at[:, here], shared.query_ids),
        ]
        return [of_queries, [(given.do.at[here, head], shared.ring_b)]]

    def compute(index):
        mine = pl.ds(column * setup.tile[1] + index * ROWS, ROWS)
        own = [
            (given.k.at[mine, kv], shared.row_a.at[index]),
            (given.v.at[mine, kv], shared.row_b.at[index]),
            (given.key_ids.at[kv, :, mine], shared.key_ids.at[index]),
        ]
        parts.fetch_own(own, shared.own_ready.at[index])

        def step(i, sums):
            return _key_step(setup, shared, rings, index, i, at(i)[2], sums)

        none = {name: setup.zeros(ROWS, setup.head_dim) for name in outputs}
        for name, total in lax.fori_loop(0, steps, step, none).items():
            outputs[name][mine, kv] = total * setup.scale if name == "k" else total

    computing = setup.tile[1] // ROWS
    parts.roles(computing, compute, lambda: parts.fetch(steps, rings, copies))


def _key_step(
    setup: Setup,
    shared: Scratch,
    rings: list[Ring],
    index: Value,
    i: Value,
    masked: Value,
    sums: dict[str, Value],
) -> dict[str, Value]:
    """The sums of a warpgroup's 64 keys after 64 queries more."""
    slot = rings[0].take(i)
    rings[1].take(i)
    q, do = shared.ring_a.at[slot], shared.ring_b.at[slot]
    (raw,) = setup.products((shared.row_a.at[index], q))
    x = setup.capped(raw)
    p = jnp.exp2(x * setup.unit - along(setup.load(shared.sums.at[slot, 0], 1), x.shape, 1))
    p = _masked(setup, masked, shared, (slot, index), p, query_axis=1)
    terms = {"v": (p, do)}
    if "k" in sums:
        (dp,) = setup.products((shared.row_b.at[index], do))
        delta = along(setup.load(shared.sums.at[slot, 1], 1), p.shape, 1)
        # Once more: a weight of 0 does not stop a product that overflows.
        ds = setup.score_gradient(p, dp, delta, x)
        ds = _masked(setup, masked, shared, (slot, index), ds, query_axis=1)
        terms["k"] = (ds, q)
    made = setup.accumulate(*((total, *terms[name]) for name, total in sums.items()))
    plgpu.commit_smem()
    for ring in rings:
        ring.give(slot)
    return dict(zip(sums, made, strict=True))


def _column_walk(
    setup: Setup, given: Given, column: Value, kv: Value
) -> tuple[Value, Callable[[Value], tuple]]:
    """How many blocks of queries a key tile meets, all heads of its group counted, and the
    (slice of queries, query head, masked) of each."""
    queries = setup.tile[0]
    blocks, first = queries // BLOCK, given.start[column]
    visits = setup.group * blocks

    def at(i):
        pair, visit = parts.split(i, visits)
        row, _, masked = unpack(given.pairs[first + pair])
        member, part = parts.split(visit, blocks)
        return pl.ds(row * queries + part * BLOCK, BLOCK), kv * setup.group + member, masked

    return (given.start[column + 1] - first) * visits, at


def _masked(
    setup: Setup, masked: Value, shared: Scratch, at: tuple[Value, Value], x: Value, query_axis: int
) -> Value:
    """`x` where its query sees its key, else 0; ids are at (query place, key place)."""
    query_ids, key_ids = shared.query_ids.at[at[0]], shared.key_ids.at[at[1]]

    def mask(x):
        sees = setup.sees(query_ids, key_ids, x.shape, query_axis)
        plgpu.commit_smem()
        return jnp.where(sees, x, 0.0)

    return lax.cond(masked != 0, mask, lambda x: x, x)
