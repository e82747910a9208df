"""Attention over keys and values that lie in pages, or in views gathered from them.

Queries flow in with the last position that each may see, outputs and log-sum-exps flow out, so
that parts of one context can be attended to apart and merged. Invariant: what lies beyond the
last position that a query sees does not touch its output, as long as it is finite: its weight is
0, and to clear it as well would be one more pass over all values in every step. What lies in an
engine's pages is finite, as they begin with zeros and the engine stops at the first log-prob that
is not.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.attention.kernels import mosaic_tpu_paged


def paged_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "P K page D"],
    values: Float[Array, "P K page D"],
    table: Int[Array, "B C"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    implementation: str = "xla",
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Each row over the pages of its own table, see `gathered_attention`.

    Position p of a row is place ``p % page`` of page ``table[p // page]``. "xla" gathers the
    pages; "pallas" is the kernel for TPU, which reads them where they are, and which other
    devices only interpret. Raises ValueError on an unknown implementation and where shapes
    disagree.
    """
    (rows, queries, heads, dim), kv_heads = q.shape, keys.shape[1]
    if keys.shape != values.shape or keys.shape[-1] != dim or heads % kv_heads:
        raise ValueError(f"q{q.shape}, keys{keys.shape}, values{values.shape}: not of one model")
    if last.shape != (rows, queries) or len(table) != rows:
        raise ValueError(f"q{q.shape} with table{table.shape} and last{last.shape}")
    if implementation == "xla":
        return gathered_attention(q, view(keys, table), view(values, table), last, scale=scale)
    if implementation != "pallas":
        raise ValueError(f"{implementation=} must be xla or pallas")
    kernel = partial(mosaic_tpu_paged.attention, scale=scale)
    return jax.lax.platform_dependent(
        q, keys, values, table, last, tpu=kernel, default=partial(kernel, interpret=True)
    )


def view(pages: Float[Array, "P K page D"], table: Int[Array, "B C"]) -> Float[Array, "B K S D"]:
    """The pages of every table side by side, ``S = C * page``."""
    taken = jnp.swapaxes(pages[table], 1, 2)  # [B, K, C, page, D]
    return taken.reshape(*taken.shape[:2], -1, taken.shape[-1])


def gathered_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    last: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Outputs and log-sum-exps of scores, both in fp32 or wider.

    Query t of row b sees positions 0 .. last[b, t]. Where that is -1 it sees nothing: its output
    is 0 and its log-sum-exp -inf. Heads are grouped: query head h reads kv head ``h // (H / K)``.
    """
    rows, queries, heads, dim = q.shape
    kv_heads, size = k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(rows, queries, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    flat = grouped.reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=wide) * scale
    scores = scores.reshape(rows, kv_heads, -1, queries, size)
    sees = jnp.arange(size)[None, None] <= last[..., None]
    scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    o = jnp.einsum(
        "bkqs,bksd->bkqd",
        weights.astype(v.dtype).reshape(rows, kv_heads, -1, size),
        v,
        preferred_element_type=wide,
    ).reshape(*grouped.shape)
    o = o / jnp.where(total > 0, total, 1)[..., None]
    lse = (top + jnp.log(total)).transpose(0, 3, 1, 2)  # [B, T, K, G]
    return o.transpose(0, 3, 1, 2, 4).reshape(q.shape), lse.reshape(rows, queries, heads)


def merge(
    *parts: tuple[Float[Array, "B T H D"], Float[Array, "B T H"]],
) -> Float[Array, "B T H D"]:
    """The attention over all positions of `parts`, each seen in one of them only.

    Milakov and Gimelshein, arXiv 1805.02867: a softmax is put together from parts.
    """
    top = parts[0][1]
    for _, lse in parts[1:]:
        top = jnp.maximum(top, lse)
    top = jnp.where(jnp.isfinite(top), top, 0)
    shares = jnp.stack([jnp.exp(lse - top) for _, lse in parts])
    total = jnp.sum(shares, axis=0, keepdims=True)
    shares = shares / jnp.where(total > 0, total, 1)
    merged = parts[0][0] * shares[0][..., None]
    for (o, _), share in zip(parts[1:], shares[1:], strict=True):
        merged += o * share[..., None]
    return merged
