"""Forward pass of prefix-tree attention on Hopper: one query tile of one head a block.

Padded queries, keys, values and the row lists of a plan flow in; outputs and log-sum-exps
flow out. A computing warpgroup has 64 queries and keeps their softmax in registers; the
tiles it meets are exactly those of ``rows[row_start[r]:row_start[r + 1]]``. Two of them take
turns: one multiplies while the other is at its exponents, after Shah et al. (arXiv 2407.08608).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_jax.attention.kernels import mosaic_gpu_parts as parts
from forge_jax.attention.kernels.mosaic_gpu_parts import LOG2E, ROWS, Ring, Setup, along
from forge_jax.attention.tiles import unpack


class Lists(NamedTuple):
    """The ids and the lists that a kernel reads."""

    query_ids: jax.Array  # i32[2, T]: q_id, q_from
    key_ids: jax.Array  # i32[K, 3, S]: k_id, k_exit, and whether the key or value is not finite
    pairs: jax.Array  # i32[L], of `Tiles`: rows, or columns
    start: jax.Array  # i32[tiles + 1]


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
    rows = tokens // bq

    def kernel(q_ref, k_ref, v_ref, query_ids, key_ids, pairs, start, tainted_ref, o_ref, lse_ref,
               q_smem, q_ids, lse_smem, k_smem, k_ids, v_smem, q_ready, k_barriers,
               v_barriers, turns):  # fmt: skip
        row = rows - 1 - lax.axis_index("row")  # the longest lists first
        head = lax.axis_index("head")
        kv = lax.div(head, setup.group)
        first = start[row]
        steps = (start[row + 1] - first) * (bk // block)
        keys, values = Ring(stages, *k_barriers), Ring(stages, *v_barriers)

        def at(i):
            """(slice of keys, masked) of step i."""
            pair, part = parts.split(i, bk // block)
            _, column, masked = unpack(pairs[first + pair])
            return pl.ds(column * bk + part * block, block), masked

        def fetch():
            def step(i, carry):
                here, _ = at(i)
                keys.fill(i, [(k_ref.at[here, kv], k_smem), (key_ids.at[kv, :, here], k_ids)])
                values.fill(i, [(v_ref.at[here, kv], v_smem)])
                return carry

            lax.fori_loop(0, steps, step, None)
            keys.drained(steps)
            values.drained(steps)

        def compute(index):
            mine = pl.ds(row * bq + index * ROWS, ROWS)
            queries, ids = q_smem.at[index], q_ids.at[index]
            plgpu.copy_gmem_to_smem(q_ref.at[mine, head], queries, q_ready.at[index])
            plgpu.copy_gmem_to_smem(query_ids.at[:, mine], ids, q_ready.at[index])
            plgpu.barrier_wait(q_ready.at[index])
            anywhere = tainted_ref[0]

            def arrive():
                if computing == 2:
                    plgpu.barrier_arrive(turns)

            def wait():
                if computing == 2:
                    plgpu.barrier_wait(turns)

            def turn():
                arrive()
                wait()

            def step(i, carry):
                acc, top, total = carry
                _, masked = at(i)
                slot = keys.take(i)

                def mask(x):
                    taint = along(setup.load(k_ids.at[slot, 2], 1), x.shape, 1)
                    x = jnp.where(taint != 0, jnp.nan, x)
                    sees = setup.sees(ids, k_ids.at[slot], x.shape, query_axis=0)
                    plgpu.commit_smem()
                    return jnp.where(sees, x, parts.UNSEEN)

                (raw,) = setup.products((queries, k_smem.at[slot]), meanwhile=turn)
                x = setup.capped(raw)
                x = lax.cond((masked | anywhere) != 0, mask, lambda x: x, x)
                keys.give(slot)
                p, keep, top, total = parts.online_softmax(x, setup.unit, top, total)
                kept, p = acc * along(keep, acc.shape, 0), p.astype(q.dtype)
                # What ends with this turn is not to be put off beyond it.
                kept, p, top, total = lax.optimization_barrier((kept, p, top, total))
                arrive()
                slot = values.take(i)
                wait()
                (acc,) = setup.accumulate((kept, p, v_smem.at[slot]))
                values.give(slot)
                return acc, top, total

            none = setup.zeros(ROWS, dim), setup.per_row(parts.FLOOR), setup.per_row(0.0)
            pl.when(index == 1)(turn)
            acc, top, total = lax.fori_loop(0, steps, step, none)
            pl.when(index == 0)(turn)
            unseen = total == 0.0
            total = jnp.where(unseen, 1.0, total)
            lse = (top + jnp.log2(total)) * (1 / LOG2E)
            queries[...] = (acc / along(total, acc.shape, 0)).astype(q.dtype)
            lse_smem[index] = jnp.where(unseen, -jnp.inf, lse)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, o_ref.at[mine, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[index], lse_ref.at[head, mine])
            plgpu.wait_smem_to_gmem(0)

        parts.roles(computing, compute, fetch)

    return setup.launch(
        kernel,
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
        grid={"row": rows, "head": heads},
        computing=computing,
    )(q, k, v, *lists, tainted)
