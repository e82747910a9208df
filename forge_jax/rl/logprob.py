"""Log-probabilities and entropies of the loss-bearing edges, a chunk of edges at a time.

Hidden states, the unembedding and the edges flow in; one log-prob and one entropy an edge
flow out. No array of [edges, vocab] exists, forward or backward: the backward pass makes
each chunk's logits again.

With ``z = h[source] @ w / temperature`` and ``lse = log Σ exp z``, an edge has
``logp = z[label] - lse`` and ``entropy = lse - Σ p z``; the derivatives by z are
``onehot(label) - p`` and ``-p (log p + entropy)``.

Inside a `shard_map` the vocabulary may be cut over a mesh axis (Megatron-LM, arXiv 1909.08053,
section 3): the maximum, the sums and the label's logit then come from all ranks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.collectives import Axes, enter
from forge_jax.rl.supports import Supports, in_chunks, supported

CHUNK_LOGITS = 1 << 21  # logits of one chunk: 8 MiB of float32, which a last-level cache holds
DEVICE_LOGITS = 1 << 26  # ... on a TPU or GPU, which reads and sums the whole head for each chunk
SMALLEST_CHUNK = 64  # edges; fewer would read the unembedding too often

# Full precision also where a device would rather round float32 factors.
_dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def edge_logits(rows: Float[Array, "M E"], w: Float[Array, "E V"]) -> Float[Array, "M V"]:
    """``rows @ w`` in at least float32.

    16-bit factors stay as they are: their products are exact in float32, and take a matrix unit
    one pass instead of the six of float32 factors.
    """
    common = jnp.promote_types(rows.dtype, w.dtype)
    wide = jnp.promote_types(common, jnp.float32)
    return _dot(rows.astype(common), w.astype(common), preferred_element_type=wide)


def edge_logprob(
    h: Float[Array, "N E"],
    w: Float[Array, "E V"],
    source: Int[Array, " M"],
    label: Int[Array, " M"],
    temperature: Float[Array, " M"],
    *,
    support: Supports | None = None,
    chunk: int | None = None,
    logits: int = CHUNK_LOGITS,
    axis: str | None = None,
    vocab: int | None = None,
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Log-prob (nats) of `label` after token `source`, and entropy, of each of M edges.

    Both are of ``softmax(h[source] @ w / temperature)``, or of what `support` makes of it, in
    float32 (float64 if `h` or `w` is). `chunk` is the number of edges whose logits exist at once;
    by default as many as make `logits` of them. Exact gradients reach `h` and `w`; `temperature`
    (> 0) and `support` are data and get none. An edge whose cotangents are 0 adds nothing to any
    gradient.

    With `axis`, a mesh axis of the enclosing `shard_map` and all else the same on its ranks, `w`
    is this rank's columns of the vocabulary, in order of the ranks. Only the first `vocab` of
    all columns are words, so that one that the ranks do not divide can be padded; by default
    every column is. The results are the same on every rank, the gradient of `h` is summed
    over the axis and that of `w` is of this rank's columns.
    """
    edges = label.shape[0]
    if source.shape != label.shape or temperature.shape != label.shape:
        raise ValueError(f"source{source.shape}, label{label.shape}, {temperature.shape=}")
    if chunk is None:
        chunk = max(SMALLEST_CHUNK, logits // w.shape[1])
    chunk = max(1, min(chunk, edges))
    missing = -edges % chunk
    edge = (
        jnp.pad(source, (0, missing)).reshape(-1, chunk),
        jnp.pad(label, (0, missing)).reshape(-1, chunk),
        jnp.pad(temperature, (0, missing), constant_values=1).reshape(-1, chunk),
        None if support is None else in_chunks(support, chunk),
    )
    logp, entropy = _logprob(h, w, *jax.lax.stop_gradient(edge), axis, vocab)
    return logp.reshape(-1)[:edges], entropy.reshape(-1)[:edges]


def cut_edge_logprob(
    h: Float[Array, "N E"],
    w: Float[Array, "E V"],
    source: Int[Array, " M"],
    label: Int[Array, " M"],
    temperature: Float[Array, " M"],
    *,
    axes: Axes,
    vocab: int,
    support: Supports | None = None,
    logits: int = CHUNK_LOGITS,
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """`edge_logprob` of `vocab` words cut over `axes`, at most one, of the enclosing `shard_map`.

    `w` has this rank's columns, or those of all words where the ranks do not divide these: each
    then takes its share, the last one padded.
    """
    if not axes:
        return edge_logprob(h, w, source, label, temperature, support=support, logits=logits)
    [axis] = axes
    head = partial(edge_logprob, axis=axis, support=support, logits=logits)
    if w.shape[1] == vocab:
        ranks = jax.lax.axis_size(axis)
        share = -(-vocab // ranks)
        padded = jnp.pad(enter(w, axes), ((0, 0), (0, share * ranks - vocab)))
        w = jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(axis) * share, share, 1)
        head = partial(head, vocab=vocab)
    return head(h, w, source, label, temperature)


@partial(jax.custom_vjp, nondiff_argnames=("axis", "vocab"))
def _logprob(h, w, source, label, temperature, support, axis, vocab):
    return _forward(h, w, source, label, temperature, support, axis, vocab)[0]


def _wide(h, w):
    """Both operands in the dtype of the whole computation."""
    wide = jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32)
    return jnp.asarray(h, wide), jnp.asarray(w, wide)


def _first(w, axis):
    """The word that this rank's first column of `w` is."""
    return jax.lax.axis_index(axis) * w.shape[1] if axis else jnp.int32(0)


def _words(w, first):
    """The words that the columns of `w` are, [1, V]."""
    return first + jnp.arange(w.shape[1], dtype=jnp.int32)[None, :]


def _chosen(z, column):
    """Column `column` [M] of each row of `z`, 0 where this rank has no such column."""
    inside = (column >= 0) & (column < z.shape[1])
    at = jnp.where(inside, column, 0)[:, None]
    return jnp.where(inside, jnp.take_along_axis(z, at, axis=1)[:, 0], 0)


def _forward(h, w, source, label, temperature, support, axis, vocab):
    first = _first(w, axis)
    words = _words(w, first)

    def chunk(_, edge):
        source, label, temperature, support = edge
        z = edge_logits(h[source], w)
        z = supported(z, temperature, support, first)
        if vocab is not None:
            z = jnp.where(words < vocab, z, jnp.finfo(z.dtype).min)
        top = jnp.max(z, axis=1)
        if axis:
            top = jax.lax.pmax(top, axis)
        below = z - top[:, None]
        p = jnp.exp(below)
        sums = jnp.sum(p, axis=1), jnp.sum(p * below, axis=1), _chosen(below, label - first)
        total, weighted, chosen = jax.lax.psum(sums, axis) if axis else sums
        entropy = jnp.log(total) - weighted / total
        return None, (chosen - jnp.log(total), entropy, top + jnp.log(total))

    _, (logp, entropy, lse) = jax.lax.scan(chunk, None, (source, label, temperature, support))
    return (logp, entropy), (h, w, source, label, temperature, support, entropy, lse)


def _backward(axis, vocab, saved, cotangent):
    h, w, *edges = saved
    wide_h, wide_w = _wide(h, w)
    first = _first(w, axis)
    words = _words(w, first)

    def chunk(dw, edge):
        source, label, temperature, support, entropy, lse, d_logp, d_entropy = edge
        rows = wide_h[source]
        temperature = temperature.astype(dw.dtype)
        logp = supported(edge_logits(h[source], w), temperature, support, first) - lse[:, None]
        # Padded edges have zero cotangents; a finite p times 0 is 0.
        slope = d_logp[:, None] + d_entropy[:, None] * (logp + entropy[:, None])
        dz = jnp.where(words == label[:, None], d_logp[:, None], 0) - jnp.exp(logp) * slope
        if vocab is not None:
            dz = jnp.where(words < vocab, dz, 0)
        dz = dz / temperature[:, None]
        return dw + _dot(rows.T, dz), _dot(dz, wide_w.T)

    dw, rows = jax.lax.scan(chunk, jnp.zeros_like(wide_w), (*edges, *cotangent))
    dh = jnp.zeros_like(wide_h).at[edges[0].reshape(-1)].add(rows.reshape(-1, h.shape[1]))
    if axis:
        dh = jax.lax.psum(dh, axis)
    return dh.astype(h.dtype), dw.astype(w.dtype), None, None, None, None


_logprob.defvjp(_forward, _backward)
