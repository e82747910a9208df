"""Backward pass of prefix-tree attention on Hopper: dq by query tile, dk and dv by key tile.

With ``p = exp(s - lse)`` and ``delta = Σ do o - dlse``: ``dv = pᵀ do``,
``ds = p (do vᵀ - delta)``, ``dq = scale ds k``, ``dk = scale dsᵀ q``. Both kernels compute
s anew; the second holds it transposed, so that each weight is already where its product
wants it. A key tile takes all query heads of its key head in turn, and needs no second sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_jax.attention.kernels import mosaic_gpu_parts as parts
from forge_jax.attention.kernels.mosaic_gpu_forward import Lists
from forge_jax.attention.kernels.mosaic_gpu_parts import ROWS, Ring, Setup, along
from forge_jax.attention.tiles import unpack

BLOCK = 64  # of keys or queries a step


class Inputs(NamedTuple):
    """What both kernels read, in whole tiles and finite where it meets an unseen pair."""

    q: jax.Array  # [T, H, D]
    k: jax.Array  # [S, K, D]
    v: jax.Array  # [S, K, D]
    do: jax.Array  # [T, H, D]
    sums: jax.Array  # f32[H, 2, T]: lse in powers of 2, delta


def query_gradient(setup: Setup, inputs: Inputs, lists: Lists) -> jax.Array:
    """dq [T, H, D] in the dtype of q; `lists` are of rows."""
    q = inputs.q
    (bq, bk), (tokens, heads, dim) = setup.tile, q.shape
    computing, blocks = bq // ROWS, bk // BLOCK
    stages = setup.stages(kept_rows=2 * bq, ring_rows=2 * BLOCK)
    rows = tokens // bq

    def kernel(q_ref, k_ref, v_ref, do_ref, sums_ref, query_ids, key_ids, pairs, start, dq_ref,
               q_smem, do_smem, sums_smem, q_ids, k_smem, k_ids, v_smem, q_ready, k_barriers,
               v_barriers):  # fmt: skip
        row = rows - 1 - lax.axis_index("row")  # the longest lists first
        head = lax.axis_index("head")
        kv = lax.div(head, setup.group)
        first = start[row]
        steps = (start[row + 1] - first) * blocks
        keys, values = Ring(stages, *k_barriers), Ring(stages, *v_barriers)

        def at(i):
            """(slice of keys, masked) of step i."""
            pair, part = parts.split(i, blocks)
            _, column, masked = unpack(pairs[first + pair])
            return pl.ds(column * bk + part * BLOCK, BLOCK), masked

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
            queries, outward, ids = q_smem.at[index], do_smem.at[index], q_ids.at[index]
            own = [
                (q_ref.at[mine, head], queries),
                (do_ref.at[mine, head], outward),
                (sums_ref.at[head, :, mine], sums_smem.at[index]),
                (query_ids.at[:, mine], ids),
            ]
            for source, destination in own:
                plgpu.copy_gmem_to_smem(source, destination, q_ready.at[index])
            plgpu.barrier_wait(q_ready.at[index])
            lse, delta = (setup.load(sums_smem.at[index, n], 0) for n in range(2))

            def step(i, dq):
                _, masked = at(i)
                slot = keys.take(i)

                def mask(x):
                    sees = setup.sees(ids, k_ids.at[slot], x.shape, query_axis=0)
                    plgpu.commit_smem()
                    return jnp.where(sees, x, 0.0)

                values.take(i)
                raw, dp = setup.products((queries, k_smem.at[slot]), (outward, v_smem.at[slot]))
                values.give(slot)
                x = setup.capped(raw)
                p = jnp.exp2(x * setup.unit - along(lse, x.shape, 0))
                ds = setup.score_gradient(p, dp, along(delta, p.shape, 0), x)
                ds = lax.cond(masked != 0, mask, lambda x: x, ds)
                (dq,) = setup.accumulate((dq, ds, k_smem.at[slot]))
                keys.give(slot)
                return dq

            dq = lax.fori_loop(0, steps, step, setup.zeros(ROWS, dim))
            queries[...] = (dq * setup.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, dq_ref.at[mine, head])
            plgpu.wait_smem_to_gmem(0)

        parts.roles(computing, compute, fetch)

    return setup.launch(
        kernel,
        outputs=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=(
            setup.shared(computing, ROWS),
            setup.shared(computing, ROWS),
            plgpu.SMEM((computing, 2, ROWS), jnp.float32),
            plgpu.SMEM((computing, 2, ROWS), jnp.int32),
            setup.shared(stages, BLOCK),
            plgpu.SMEM((stages, 3, BLOCK), jnp.int32),
            setup.shared(stages, BLOCK),
            plgpu.Barrier(num_arrivals=4, num_barriers=computing),
            parts.barriers(stages, 2, computing),
            parts.barriers(stages, 1, computing),
        ),
        grid={"row": rows, "head": heads},
        computing=computing,
    )(*inputs, *lists)


def key_gradients(
    setup: Setup, inputs: Inputs, lists: Lists, wanted: str = "kv"
) -> dict[str, jax.Array]:
    """float32 dk and dv [S, K, D] by name; `lists` are of columns.

    Both at once while the registers hold two sums of [64, D]; else one at a time.
    """
    (bq, bk), (keys, kv_heads, dim) = setup.tile, inputs.k.shape
    if dim > 128 and len(wanted) > 1:
        each = [key_gradients(setup, inputs, lists, name) for name in wanted]
        return each[0] | each[1]
    computing, blocks = bk // ROWS, bq // BLOCK
    stages = setup.stages(kept_rows=2 * bk, ring_rows=2 * BLOCK)
    visits = setup.group * blocks  # steps of a pair: query heads, and parts of a tile

    def kernel(q_ref, k_ref, v_ref, do_ref, sums_ref, query_ids, key_ids, pairs, start, *rest):
        (k_smem, v_smem, k_ids, q_smem, sums_smem, q_ids, do_smem, k_ready, q_barriers,
         do_barriers) = rest[len(wanted) :]  # fmt: skip
        column, kv = lax.axis_index("column"), lax.axis_index("head")
        first = start[column]
        steps = (start[column + 1] - first) * visits
        queries, outward = Ring(stages, *q_barriers), Ring(stages, *do_barriers)

        def at(i):
            """(slice of queries, query head, masked) of step i."""
            pair, visit = parts.split(i, visits)
            row, _, masked = unpack(pairs[first + pair])
            member, part = parts.split(visit, blocks)
            return pl.ds(row * bq + part * BLOCK, BLOCK), kv * setup.group + member, masked

        def fetch():
            def step(i, carry):
                here, head, _ = at(i)
                copies = [
                    (q_ref.at[here, head], q_smem),
                    (sums_ref.at[head, :, here], sums_smem),
                    (query_ids.at[:, here], q_ids),
                ]
                queries.fill(i, copies)
                outward.fill(i, [(do_ref.at[here, head], do_smem)])
                return carry

            lax.fori_loop(0, steps, step, None)
            queries.drained(steps)
            outward.drained(steps)

        def compute(index):
            mine = pl.ds(column * bk + index * ROWS, ROWS)
            own_k, own_v, ids = k_smem.at[index], v_smem.at[index], k_ids.at[index]
            own = [
                (k_ref.at[mine, kv], own_k),
                (v_ref.at[mine, kv], own_v),
                (key_ids.at[kv, :, mine], ids),
            ]
            for source, destination in own:
                plgpu.copy_gmem_to_smem(source, destination, k_ready.at[index])
            plgpu.barrier_wait(k_ready.at[index])

            def step(i, sums):
                _, _, masked = at(i)
                slot = queries.take(i)

                def mask(x):
                    sees = setup.sees(q_ids.at[slot], ids, x.shape, query_axis=1)
                    return jnp.where(sees, x, 0.0)

                outward.take(i)
                here_q, here_do = q_smem.at[slot], do_smem.at[slot]
                (raw,) = setup.products((own_k, here_q))
                x = setup.capped(raw)
                lse = along(setup.load(sums_smem.at[slot, 0], 1), x.shape, 1)
                p = jnp.exp2(x * setup.unit - lse)
                p = lax.cond(masked != 0, mask, lambda x: x, p)
                terms = {"v": (p, here_do)}
                if "k" in wanted:
                    (dp,) = setup.products((own_v, here_do))
                    delta = along(setup.load(sums_smem.at[slot, 1], 1), p.shape, 1)
                    # Once more: a weight of 0 does not stop a product that overflows.
                    ds = setup.score_gradient(p, dp, delta, x)
                    ds = lax.cond(masked != 0, mask, lambda x: x, ds)
                    terms["k"] = (ds, here_q)
                sums = setup.accumulate(
                    *((total, *terms[name]) for total, name in zip(sums, wanted, strict=True))
                )
                plgpu.commit_smem()
                queries.give(slot)
                outward.give(slot)
                return sums

            sums = lax.fori_loop(0, steps, step, [setup.zeros(ROWS, dim) for _ in wanted])
            for ref, total, name in zip(rest, sums, wanted, strict=False):
                ref[mine, kv] = total * setup.scale if name == "k" else total

        parts.roles(computing, compute, fetch)

    made = setup.launch(
        kernel,
        outputs=tuple(jax.ShapeDtypeStruct(inputs.k.shape, jnp.float32) for _ in wanted),
        scratch=(
            setup.shared(computing, ROWS),
            setup.shared(computing, ROWS),
            plgpu.SMEM((computing, 3, ROWS), jnp.int32),
            setup.shared(stages, BLOCK),
            plgpu.SMEM((stages, 2, BLOCK), jnp.float32),
            plgpu.SMEM((stages, 2, BLOCK), jnp.int32),
            setup.shared(stages, BLOCK),
            plgpu.Barrier(num_arrivals=3, num_barriers=computing),
            parts.barriers(stages, 3, computing),
            parts.barriers(stages, 1, computing),
        ),
        grid={"column": keys // bk, "head": kv_heads},
        computing=computing,
    )(*inputs, *lists)
    return dict(zip(wanted, made, strict=True))
