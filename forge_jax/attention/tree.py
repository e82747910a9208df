"""Prefix-tree attention, the public op: picks an implementation for the device.

Queries, keys, values and a `TilePlan` flow in; outputs and log-sum-exps flow out, the
same for every implementation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from forge_jax.attention.kernels import mosaic_gpu, mosaic_tpu
from forge_jax.attention.kernels.xla_scan import scan_attention
from forge_jax.attention.plan import TilePlan, padded_length
from forge_jax.attention.reference import reference_attention
from forge_jax.attention.tiles import Tiles
from forge_jax.config import UserError

IMPLEMENTATIONS = ("auto", "xla", "mosaic_tpu", "mosaic_gpu", "reference")
BY_PLATFORM = {"cpu": "xla", "tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
KERNELS = {
    "xla": scan_attention,
    "mosaic_tpu": mosaic_tpu.attention,
    "mosaic_gpu": mosaic_gpu.attention,
}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


def resolve(implementation: str, dtype: Any) -> str:
    """The implementation that "auto" stands for on this machine's default device, for queries
    of `dtype`: on a GPU the kernels multiply 16-bit factors, and the scan the others.

    Raises UserError for an unknown one, NotImplementedError on a device without one.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attention implementation {implementation!r} is unknown; known: "
            + ", ".join(IMPLEMENTATIONS)
        )
    if implementation != "auto":
        return implementation
    platform = jax.default_backend()
    if platform not in BY_PLATFORM:
        raise NotImplementedError(
            f"attention on {platform}: choose attention=xla, which runs there"
        )
    wide = jnp.dtype(dtype).itemsize > 2
    return "xla" if platform == "gpu" and wide else BY_PLATFORM[platform]


def layout_of(implementation: str, dtype: Any) -> str:
    """The layout of plans that an implementation walks: see `build_plan`."""
    return "tiles" if resolve(implementation, dtype).startswith("mosaic") else "steps"


def default_tile(implementation: str, dtype: Any) -> tuple[int, int]:
    """Queries and keys of a tile that suit an implementation."""
    tiles = {"mosaic_tpu": mosaic_tpu.TILE, "mosaic_gpu": mosaic_gpu.TILE}
    return tiles.get(resolve(implementation, dtype), (64, 64))


def tree_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    softcap: float | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """Attention where query i sees key j iff ``q_from[i] <= k_id[j] <= q_id[i] < k_exit[j]``.

    Query head h reads key head ``h // (H // K)``. Returns (o, lse): o in the dtype of `q`,
    lse in float32 (float64 for float64 inputs); a query that sees nothing has o = 0,
    lse = -inf and zero gradients. `k` and `v` may be wider than `q`: they are rounded to its
    dtype, and their gradients are as wide as they are. With a `softcap` c a score s becomes
    ``c tanh(s / c)`` (arXiv 2408.00118).

    "xla" is the live-tile scan, for any device; "mosaic_tpu" and "mosaic_gpu" are kernels for
    TPUs and for Hopper GPUs; "reference" is dense, for small inputs; "auto" is the one
    for the default device and the dtype: see `resolve`.
    Raises UserError for an unknown implementation, NotImplementedError for an unsupported
    dtype, ValueError where shapes disagree with each other or the plan, the plan is not laid
    out for the implementation, or `softcap` is not positive.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{softcap=} must be positive")
    chosen = resolve(implementation, q.dtype)
    _check(q, k, v, plan, chosen)
    if chosen == "reference":
        return _dense(q, k, v, plan, scale, softcap)
    return KERNELS[chosen](q, k, v, plan, scale=scale, softcap=softcap)


def _dense(
    q: Array, k: Array, v: Array, plan: TilePlan, scale: float, softcap: float | None
) -> tuple[Array, Array]:
    t, s = q.shape[0], k.shape[0]
    q_id, q_from, k_id, k_exit = map(
        jnp.asarray, (plan.q_id[:t], plan.q_from[:t], plan.k_id[:s], plan.k_exit[:s])
    )
    return reference_attention(q, k, v, q_id, k_id, k_exit, scale, q_from=q_from, softcap=softcap)


def _check(q: Array, k: Array, v: Array, plan: TilePlan, implementation: str) -> None:
    (t, h, d), (s, kv, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[-1] != d:
        raise ValueError(f"q{q.shape}, k{k.shape} and v{v.shape} do not belong together")
    if h % kv:
        raise ValueError(f"{h} query heads are no multiple of {kv} key heads")
    for x in (q, k, v):
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"attention over dtype {x.dtype}")
    if k.dtype != v.dtype or jnp.promote_types(q.dtype, k.dtype) != k.dtype:
        raise NotImplementedError(f"attention of {q.dtype} queries over {k.dtype} and {v.dtype}")
    layout = "tiles" if isinstance(plan.lists, Tiles) else "steps"
    if implementation != "reference" and layout != layout_of(implementation, q.dtype):
        raise ValueError(f"a plan of {layout} for {implementation}")
    (bq, bk), spare = plan.tile, layout == "steps"
    planned = plan.q_id.shape[0], plan.k_id.shape[0] - bk * spare
    if planned != (padded_length(t, bq), padded_length(s, bk)):
        raise ValueError(f"q{q.shape}, k{k.shape} for a plan of {planned} (padded) tokens")
