"""Dense attention under the prefix-tree predicate: the oracle of every faster kernel.

Queries, keys, values and their ids flow in; outputs and log-sum-exps flow out.
Query i sees key j iff ``q_from[i] <= k_id[j] <= q_id[i] < k_exit[j]``.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def reference_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    q_id: Int[Array, " T"],
    k_id: Int[Array, " S"],
    k_exit: Int[Array, " S"],
    scale: float,
    *,
    q_from: Int[Array, " T"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "H T"]]:
    """Softmax attention with the whole [T, S] mask in memory: for small T and S.

    Query head h reads key head ``h // (H // K)``. Scores and sums are float32, or float64 for
    float64 inputs. Returns (o, lse), o in the dtype of `q`; a query that sees nothing has o = 0
    and lse = -inf, and gradients of 0. Keys and values wider than `q` are rounded to its dtype
    first. With a `softcap` c a score s becomes ``c tanh(s / c)`` (arXiv 2408.00118).
    """
    (t, h, d), kv = q.shape, k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    sees = (k_id[None, :] <= q_id[:, None]) & (q_id[:, None] < k_exit[None, :])
    if q_from is not None:
        sees &= q_from[:, None] <= k_id[None, :]
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    grouped = q.reshape(t, kv, h // kv, d).astype(wide)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(wide)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # A finite stand-in before max and exp, a second mask after it: 0 * NaN never happens.
    scores = jnp.where(sees[None, None], scores, jnp.finfo(wide).min)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
    weights = jnp.where(sees[None, None], jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    # A value nobody sees must not leak even if it is NaN.
    visible = jnp.any(sees, axis=0)[:, None, None]
    out = jnp.einsum("kgts,skd->tkgd", weights / safe[..., None], jnp.where(visible, v, 0.0))
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(safe), -jnp.inf)
    return out.reshape(t, h, d).astype(q.dtype), lse.reshape(h, t)
