"""Draws one token a row from logits, with one uniform number a row.

Logits, temperatures and keys flow in, tokens and their log-probs flow out. Invariant: a
row's token and log-prob depend on that row alone, and a token of probability 0 is never drawn.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def request_key(high: Array, low: Array, choice: Array) -> Key[Array, " B"]:
    """``fold_in(key(seed), choice)`` for seeds given as their high and low 32 bits, i32[B]."""
    words = jax.lax.bitcast_convert_type(jnp.stack([high, low], axis=-1), jnp.uint32)
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, choice)


def sample(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    keys: Key[Array, " B"],
    position: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Tokens i32[B] for `position`, and their log-probs f32[B].

    Randomness is one uniform of ``fold_in(key, position)``; the log-prob is of
    softmax(logits / temperature). Temperature 0 takes the first of the largest logits, with
    log-prob 0.
    """
    greedy = temperature == 0
    scale = jnp.where(greedy, 1.0, temperature)
    return drawn(logits.astype(jnp.float32) / scale[:, None], greedy, uniforms(keys, position))


def uniforms(keys: Key[Array, " B"], position: Int[Array, " B"]) -> Float[Array, " B"]:
    """One number in [0, 1) a row, of ``fold_in(key, position)``."""
    return jax.vmap(lambda k, p: jax.random.uniform(jax.random.fold_in(k, p)))(keys, position)


def drawn(
    x: Float[Array, "B V"], greedy: Bool[Array, " B"], uniform: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Tokens of softmax(x) and their log-probs; the first of the largest, and 0, where greedy."""
    top = jnp.max(x, axis=-1, keepdims=True)
    token, total = _inverse_cdf(jnp.exp(x - top), uniform)
    chosen = jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]
    logp = chosen - top[:, 0] - jnp.log(total)
    return jnp.where(greedy, _first(x == top), token), jnp.where(greedy, 0.0, logp)


def raw_logprobs(
    logits: Float[Array, "B V"],
    token: Int[Array, " B"],
    logp: Float[Array, " B"],
    temperature: Float[Array, " B"],
) -> Float[Array, " B"]:
    """Log-probs f32[B] of tokens under softmax(logits), given those under the temperatures.

    At temperature 1 they are the same; a second softmax is computed only where one is not.
    """

    def recomputed() -> Array:
        x = logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]
        return jnp.where(temperature == 1, logp, chosen - jax.nn.logsumexp(x, axis=-1))

    return jax.lax.cond(jnp.all(temperature == 1), lambda: logp, recomputed)


def _inverse_cdf(
    weights: Float[Array, "B V"], uniform: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The index where the running sum of `weights` passes ``uniform * total``, and the total.

    Sums over blocks of about sqrt(V) first, then looks inside one block: two short
    running sums in place of one of length V.
    """
    rows, vocab = weights.shape
    width = 1 << ((vocab - 1).bit_length() + 1) // 2
    count = -(-vocab // width)
    blocks = jnp.pad(weights, ((0, 0), (0, count * width - vocab))).reshape(rows, count, width)
    sums = jnp.sum(blocks, axis=-1)
    passed = jnp.cumsum(sums, axis=-1)
    total = passed[:, -1]
    target = uniform * total
    block = _crossing(passed, sums, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    before = jnp.take_along_axis(passed - sums, block[:, None], axis=-1)[:, 0]
    offset = _crossing(jnp.cumsum(inside, axis=-1), inside, target - before)
    return block * width + offset, total


def _crossing(
    running: Float[Array, "B N"], weights: Float[Array, "B N"], target: Float[Array, " B"]
) -> Int[Array, " B"]:
    """First index with positive weight whose running sum exceeds the target.

    Rounding can leave none; then the last index with positive weight.
    """
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
    return jnp.minimum(_first((running > target[:, None]) & (weights > 0)), last)


def _first(hit: Array) -> Int[Array, " B"]:
    """Index of the first true of each row, the row's length where there is none.

    A minimum over indices, which compiles to far faster code than argmax on CPU.
    """
    size = hit.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.min(jnp.where(hit, index, size), axis=-1)
