"""Prefix-tree attention on NVIDIA Hopper, by Pallas Mosaic GPU kernels.

Queries, keys, values and a `TilePlan` of tiles flow in; outputs and log-sum-exps flow out,
and gradients back. Products are WGMMA over 16-bit factors with float32 sums; softmax, masks
and all that is summed are float32. What a query does not see cannot reach it, not even a NaN.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from forge_jax.attention.kernels.mosaic_gpu_backward import (
    Inputs,
    key_gradients,
    query_gradient,
)
from forge_jax.attention.kernels.mosaic_gpu_forward import Lists, forward
from forge_jax.attention.kernels.mosaic_gpu_parts import LOG2E, Setup
from forge_jax.attention.plan import TilePlan
from forge_jax.attention.tiles import Tiles

TILE = (128, 128)  # what two computing warpgroups share; sides of 64 leave them one
SIDES = (64, 128)  # of a tile
WIDEST = 256  # head dim: the most columns of a product
STEP = 32  # head dims are padded with zeros to a multiple of it
NEVER = 1e30  # log-sum-exp of a query that sees nothing, in the backward pass: weights are 0
HINT = "attention=xla runs on any device"


def attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    softcap: float | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """See `forge_jax.attention.tree.tree_attention`; the plan is one of tiles.

    `q` is bfloat16 or float16; float32 `k` and `v` are rounded to it, and their gradients
    come back in float32. `interpret` takes the parameters of Pallas' GPU interpreter.
    Raises NotImplementedError for other dtypes, head dims, tiles and cards, ValueError for a
    scale or a softcap that is not positive.
    """
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"{scale=} and {softcap=} must be positive")
    _supported(q, k, v, plan)
    if not interpret:
        _hopper()
    head_dim = q.shape[2]
    spare = [(0, 0), (0, 0), (0, -head_dim % STEP)]
    q, k, v = (jnp.pad(x, spare) for x in (q, k, v))
    setup = Setup(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=q.dtype,
        tile=plan.tile,
        windowed=plan.windowed,
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        interpret=interpret,
    )
    plan = jax.tree.map(jnp.asarray, plan)
    o, lse = _attend(q, k, v, plan, setup, (k.dtype, v.dtype))
    return o[:, :, :head_dim], lse


@partial(jax.custom_vjp, nondiff_argnames=("setup", "dtypes"))
def _attend(q, k, v, plan, setup, dtypes):
    return _forward(q, k, v, plan, setup, dtypes)[0]


def _forward(q, k, v, plan, setup, dtypes):
    # A key that is not finite, or whose value is not, is replaced by zeros: the zero weight of
    # a query that does not see it would not stop it in a product. A flag beside its ids makes
    # its score NaN, before the mask.
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    sound = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)
    k, v = (jnp.where(sound[..., None], x, 0) for x in (k, v))
    ids = _ids(plan, ~sound)
    queries, keys = len(plan.q_id), len(plan.k_id)
    o, lse = forward(
        setup,
        _padded(q, queries),
        _padded(k, keys),
        _padded(v, keys),
        Lists(*ids, plan.lists.rows, plan.lists.row_start),
        jnp.any(~sound)[None].astype(jnp.int32),
    )
    o, lse = o[: len(q)], lse[:, : len(q)]
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention")
    return (o, lse), (q, k, v, o, lse, plan, ids)


def _backward(setup, dtypes, saved, gradients):
    q, k, v, o, lse, plan, ids = saved
    do, dlse = gradients
    # As in the forward pass: a query that is not finite, or whose gradient is not, becomes
    # zeros, and its weights NaN at what it sees. One that sees nothing gets weights of 0.
    unseen = lse == -jnp.inf
    delta = jnp.einsum("thd,thd->ht", do, o, preferred_element_type=jnp.float32) - dlse
    delta = jnp.where(unseen, 0.0, delta)
    sound = jnp.all(jnp.isfinite(q) & jnp.isfinite(do), axis=-1) & ~unseen.T
    q, do = (jnp.where(sound[..., None], x, 0) for x in (q, do))
    lse = jnp.where(unseen, NEVER, jnp.where(sound.T, lse * LOG2E, jnp.nan))
    queries, keys = len(plan.q_id), len(plan.k_id)
    inputs = Inputs(
        q=_padded(q, queries),
        k=_padded(k, keys),
        v=_padded(v, keys),
        do=_padded(do, queries),
        sums=_padded(jnp.stack([lse.T, delta.T]).transpose(1, 2, 0), queries).transpose(1, 2, 0),
    )
    lists = plan.lists
    dq = query_gradient(setup, inputs, Lists(ids[0], ids[1], lists.rows, lists.row_start))
    dkv = key_gradients(setup, inputs, Lists(ids[0], ids[1], lists.columns, lists.column_start))
    dk, dv = (dkv[name][: len(k)].astype(dtype) for name, dtype in zip("kv", dtypes, strict=True))
    return dq[: len(q)], dk, dv, None


_attend.defvjp(_forward, _backward)


def _ids(plan: TilePlan, tainted: Array) -> tuple[Array, Array]:
    """Ids of queries and keys as in `Lists`; `tainted` bool[S, K]."""
    flags = _padded(tainted.astype(jnp.int32), len(plan.k_id)).T
    key_ids = [jnp.broadcast_to(x, flags.shape) for x in (plan.k_id[None], plan.k_exit[None])]
    return jnp.stack([plan.q_id, plan.q_from]), jnp.stack([*key_ids, flags], axis=1)


def _padded(x: Array, rows: int) -> Array:
    return jnp.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _supported(q: Array, k: Array, v: Array, plan: TilePlan) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"attention=mosaic_gpu takes bfloat16 and float16 queries, not {q.dtype}; {HINT}"
        )
    for x in (k, v):
        if x.dtype not in (q.dtype, jnp.float32):
            raise NotImplementedError(
                f"attention=mosaic_gpu over {q.dtype} queries and {x.dtype} keys or values; {HINT}"
            )
    if q.shape[-1] > WIDEST:
        raise NotImplementedError(
            f"attention=mosaic_gpu has head dims up to {WIDEST}, not {q.shape[-1]}; {HINT}"
        )
    if not isinstance(plan.lists, Tiles) or not set(plan.tile) <= set(SIDES):
        raise NotImplementedError(
            f"attention=mosaic_gpu takes plans of tiles with sides of {SIDES}, not "
            f"{type(plan.lists).__name__} of {plan.tile}"
        )


def _hopper() -> None:
    """Refuses a card without WGMMA. Without a card at hand, the kernel may be lowered for one."""
    if jax.default_backend() != "gpu":
        return
    card = jax.devices()[0]
    if not str(card.compute_capability).startswith("9."):
        raise NotImplementedError(
            f"attention=mosaic_gpu is made of WGMMA, which {card.device_kind} (compute capability "
            f"{card.compute_capability}) does not have: 9.x is needed; {HINT}"
        )
