"""Prefix-tree attention, the public op: picks an implementation for the device.

Queries, keys, values and a `TilePlan` flow in; outputs and log-sum-exps flow out, the
same for every implementation.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from forge_jax.attention.kernels.xla_scan import scan_attention
from forge_jax.attention.plan import TilePlan, padded_length
from forge_jax.attention.reference import reference_attention
from forge_jax.config import UserError

IMPLEMENTATIONS = ("auto", "xla", "reference")


def tree_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    implementation: str = "auto",
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """Attention where query i sees key j iff ``k_id[j] <= q_id[i] < k_exit[j]``.

    Query head h reads key head ``h // (H // K)``. Returns (o, lse): o in the dtype of `q`,
    lse in float32 (float64 for float64 inputs); a query that sees nothing has o = 0,
    lse = -inf and zero gradients. "auto" is the live-tile scan "xla"; "reference" is
    dense, for small inputs.

    Raises UserError for an unknown implementation, NotImplementedError for an
    unsupported dtype, ValueError where shapes disagree with each other or the plan.
    """
    _check(q, k, v, plan)
    if implementation in ("auto", "xla"):
        return scan_attention(q, k, v, plan, scale=scale)
    if implementation == "reference":
        t, s = q.shape[0], k.shape[0]
        q_id, k_id, k_exit = map(jnp.asarray, (plan.q_id, plan.k_id, plan.k_exit))
        return reference_attention(q, k, v, q_id[:t], k_id[:s], k_exit[:s], scale)
    raise UserError(
        f"attention implementation {implementation!r} is unknown; known: "
        + ", ".join(IMPLEMENTATIONS)
    )


def _check(q: Array, k: Array, v: Array, plan: TilePlan) -> None:
    (t, h, d), (s, kv, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[-1] != d:
        raise ValueError(f"q{q.shape}, k{k.shape} and v{v.shape} do not belong together")
    if h % kv:
        raise ValueError(f"{h} query heads are no multiple of {kv} key heads")
    planned = plan.q_id.shape[0], plan.k_id.shape[0] - plan.tile
    if planned != (padded_length(t, plan.tile), padded_length(s, plan.tile)):
        raise ValueError(f"q{q.shape}, k{k.shape} for a plan of {planned} (padded) tokens")
    for x in (q, k, v):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
            raise NotImplementedError(f"attention over dtype {x.dtype}")
