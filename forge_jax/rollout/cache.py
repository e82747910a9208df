"""The key-value cache of the slots, and the attention that reads and writes it.

A cache is a tuple with one (keys, values) pair a layer, each ``[B, K, S, D]``: slot, kv head,
position, head dim. Invariant: position p of a slot is written before anything reads it, so
what an earlier request left there is never seen.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Array, Float, Int

from forge_jax.models.config import ModelConfig
from forge_jax.models.transformer import Attend
from forge_jax.sharding import PLACES, RULES

QUERY_BLOCK = 128  # queries of a prefill whose scores exist at once


def cache_sharding(like: Sharding, cfg: ModelConfig, slots: int) -> Sharding:
    """Where the cache lives, given where a parameter does: kv heads are cut as their weights,
    slots over the places of the mesh where these divide them."""
    if not isinstance(like, NamedSharding):
        return like
    [axis] = RULES["kv_heads"]
    heads = axis if cfg.kv_heads % like.mesh.shape[axis] == 0 else None
    places = math.prod(like.mesh.shape[place] for place in PLACES)
    return NamedSharding(like.mesh, jax.P(PLACES if slots % places == 0 else None, heads))


def empty_cache(
    cfg: ModelConfig, slots: int, context: int, dtype: Any, sharding: Sharding
) -> tuple[tuple[Array, Array], ...]:
    """Zeroed keys and values for every layer."""
    shape = (slots, cfg.kv_heads, context, cfg.head_dim)

    def zeros() -> Array:
        return jax.device_put(jnp.zeros(shape, dtype), sharding, may_alias=False)

    return tuple((zeros(), zeros()) for _ in range(cfg.layers))


def prefill_attend(slot: Int[Array, " R"]) -> Attend:
    """Causal attention inside each of R prompts; their keys and values go to their slots.

    A slot that does not exist is not written.
    """

    def attend(q: Array, k: Array, v: Array, layer: tuple[Array, Array]) -> tuple[Array, Any]:
        written = tuple(
            old.at[slot, :, : new.shape[1]].set(jnp.swapaxes(new, 1, 2), mode="drop")
            for old, new in zip(layer, (k, v), strict=True)
        )
        return causal_attention(q, k, v), written

    return attend


def decode_attend(position: Int[Array, " B"]) -> Attend:
    """One query a slot, at `position`, over the positions up to its own."""

    def attend(q: Array, k: Array, v: Array, layer: tuple[Array, Array]) -> tuple[Array, Any]:
        slot = jnp.arange(len(position))
        keys, values = (
            old.at[slot, :, position].set(new, mode="promise_in_bounds", unique_indices=True)
            for old, new in zip(layer, (k, v), strict=True)
        )
        sees = jnp.arange(keys.shape[2])[None] <= position[:, None]
        grouped = q.reshape(*k.shape[:2], -1, q.shape[-1])  # [B, K, G, D]
        o = _attention(grouped, keys, values, sees[:, None, None])
        return o.reshape(q.shape), (keys, values)

    return attend


def causal_attention(
    q: Float[Array, "R T H D"], k: Float[Array, "R T K D"], v: Float[Array, "R T K D"]
) -> Float[Array, "R T H D"]:
    """Causal grouped-query attention, a block of queries at a time."""
    rows, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    block = min(QUERY_BLOCK, length)
    count = -(-length // block)
    padded = jnp.pad(q, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
    blocks = padded.reshape(rows, count, block, kv_heads, heads // kv_heads, dim)

    def one(args: tuple[Array, Array]) -> Array:
        start, queries = args  # [], [R, Q, K, G, D]
        grouped = queries.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
        index = jnp.tile(start + jnp.arange(block), heads // kv_heads)
        sees = jnp.arange(length)[None] <= index[:, None]
        o = _attention(grouped, keys, values, sees[None, None])
        return o.reshape(rows, heads, block, dim)

    starts = jnp.arange(count) * block
    out = jax.lax.map(one, (starts, jnp.swapaxes(blocks, 0, 1)))  # [count, R, H, Q, D]
    return out.transpose(1, 0, 3, 2, 4).reshape(rows, -1, heads, dim)[:, :length]


def _attention(
    q: Float[Array, "R K Q D"], k: Float[Array, "R K S D"], v: Float[Array, "R K S D"], sees: Array
) -> Float[Array, "R K Q D"]:
    """Masked attention with scores and softmax in fp32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("rkqd,rksd->rkqs", q, k, preferred_element_type=wide)
    scores = jnp.where(sees, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("rkqs,rksd->rkqd", weights.astype(v.dtype), v)
