"""Log-probabilities and entropies of the loss-bearing edges, a chunk of edges at a time.

Hidden states, the unembedding and the edges flow in; one log-prob and one entropy an edge
flow out. No array of [edges, vocab] exists, forward or backward: the backward pass makes
each chunk's logits again.

With ``z = h[source] @ w / temperature`` and ``lse = log Σ exp z``, an edge has
``logp = z[label] - lse`` and ``entropy = lse - Σ p z``; the derivatives by z are
``onehot(label) - p`` and ``-p (log p + entropy)``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK_LOGITS = 1 << 21  # logits of one chunk: 8 MiB of float32, which a last-level cache holds
SMALLEST_CHUNK = 64  # edges; fewer would read the unembedding too often


def edge_logprob(
    h: Float[Array, "N E"],
    w: Float[Array, "E V"],
    source: Int[Array, " M"],
    label: Int[Array, " M"],
    temperature: Float[Array, " M"],
    *,
    chunk: int | None = None,
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Log-prob (nats) of `label` after token `source`, and entropy, of each of M edges.

    Both are of ``softmax(h[source] @ w / temperature)``, in float32 (float64 if `h` or `w`
    is). `chunk` is the number of edges whose logits exist at once; by default it follows
    from the vocabulary. Exact gradients reach `h` and `w`; `temperature` (> 0) is data and
    gets none. An edge whose cotangents are 0 adds nothing to any gradient.
    """
    edges = label.shape[0]
    if source.shape != label.shape or temperature.shape != label.shape:
        raise ValueError(f"source{source.shape}, label{label.shape}, {temperature.shape=}")
    if chunk is None:
        chunk = max(SMALLEST_CHUNK, CHUNK_LOGITS // w.shape[1])
    chunk = max(1, min(chunk, edges))
    missing = -edges % chunk
    edge = (
        jnp.pad(source, (0, missing)).reshape(-1, chunk),
        jnp.pad(label, (0, missing)).reshape(-1, chunk),
        jnp.pad(temperature, (0, missing), constant_values=1).reshape(-1, chunk),
    )
    logp, entropy = _logprob(h, w, *jax.lax.stop_gradient(edge))
    return logp.reshape(-1)[:edges], entropy.reshape(-1)[:edges]


@jax.custom_vjp
def _logprob(h, w, source, label, temperature):
    return _forward(h, w, source, label, temperature)[0]


def _wide(h, w):
    """Both operands in the dtype of the whole computation."""
    wide = jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32)
    return jnp.asarray(h, wide), jnp.asarray(w, wide)


def _forward(h, w, source, label, temperature):
    wide_h, wide_w = _wide(h, w)

    def chunk(_, edge):
        source, label, temperature = edge
        z = (wide_h[source] @ wide_w) / temperature.astype(wide_w.dtype)[:, None]
        top = jnp.max(z, axis=1)
        below = z - top[:, None]
        p = jnp.exp(below)
        total = jnp.sum(p, axis=1)
        chosen = jnp.take_along_axis(below, label[:, None], axis=1)[:, 0]
        entropy = jnp.log(total) - jnp.sum(p * below, axis=1) / total
        return None, (chosen - jnp.log(total), entropy, top + jnp.log(total))

    _, (logp, entropy, lse) = jax.lax.scan(chunk, None, (source, label, temperature))
    return (logp, entropy), (h, w, source, label, temperature, entropy, lse)


def _backward(saved, cotangent):
    h, w, *edges = saved
    wide_h, wide_w = _wide(h, w)
    vocabulary = jnp.arange(w.shape[1])[None, :]

    def chunk(dw, edge):
        source, label, temperature, entropy, lse, d_logp, d_entropy = edge
        rows = wide_h[source]
        temperature = temperature.astype(dw.dtype)
        logp = (rows @ wide_w) / temperature[:, None] - lse[:, None]
        # Padded edges have zero cotangents; a finite p times 0 is 0.
        slope = d_logp[:, None] + d_entropy[:, None] * (logp + entropy[:, None])
        dz = jnp.where(vocabulary == label[:, None], d_logp[:, None], 0) - jnp.exp(logp) * slope
        dz = dz / temperature[:, None]
        return dw + rows.T @ dz, dz @ wide_w.T

    dw, rows = jax.lax.scan(chunk, jnp.zeros_like(wide_w), (*edges, *cotangent))
    dh = jnp.zeros_like(wide_h).at[edges[0].reshape(-1)].add(rows.reshape(-1, h.shape[1]))
    return dh.astype(h.dtype), dw.astype(w.dtype), None, None, None


_logprob.defvjp(_forward, _backward)
