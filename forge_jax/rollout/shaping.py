"""What requests do to logits before a token is drawn: bias, penalties, truncation.

Logits, the settings of the rows and what their sequences have had flow in; logits of what may
come flow out. Invariant: rows do not see one another, and one that asks for nothing has its
logits over its temperature, to the bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from forge_jax.trees import pytree

WINDOW = 128  # likeliest tokens that truncation looks at before it sorts them all


@pytree
class Settings:
    """Of each row, in the words of `drawing.Sampling`."""

    top_k: Array  # i32[B]
    top_p: Array  # f32[B]
    min_p: Array  # f32[B]
    presence: Array  # f32[B]
    frequency: Array  # f32[B]
    repetition: Array  # f32[B]
    stop_from: Array  # i32[B], first position that a stop id may have
    bias_ids: Array  # i32[B, BIASES], -1 where unused
    bias: Array  # f32[B, BIASES]


@pytree
class History:
    """What the sequence of each row has had."""

    prompt: Array  # bool[B, V], whether the prompt has a token
    counts: Array  # i32[B, V], times that the completion has


@pytree
class Changed:
    """Logits as changed, but for the temperature and truncation."""

    logits: Array  # f32[B, V]
    offset: Array  # f32[B, V], what was added to them
    excluded: Array  # bool[B, V], tokens that cannot come
    scaled: Array  # bool[B, V], tokens whose logits were multiplied too


def history_of(tokens: Int[Array, "B C"], prompt: Int[Array, " B"], vocab: int) -> History:
    """Of sequences of which the first `prompt` tokens are the prompt; -1 beyond their ends."""
    rows = jnp.arange(len(tokens))[:, None]
    inside = jnp.arange(tokens.shape[1])[None] < prompt[:, None]

    def counted(wanted: Array) -> Array:
        column = jnp.where(wanted & (tokens >= 0), tokens, vocab)
        nothing = jnp.zeros((len(tokens), vocab), jnp.int32)
        return nothing.at[rows, column].add(1, mode="drop")

    return History(prompt=counted(inside) > 0, counts=counted(~inside))


def changed(
    logits: Float[Array, "B V"],
    settings: Settings,
    history: History,
    stop: Int[Array, "B N"],
    position: Int[Array, " B"],
    banned: Bool[Array, "B V"],
) -> Changed:
    """Bias, then repetition, then the additive penalties (vLLM's order), and what may not come
    at `position`: what is `banned`, and stop ids before their time, unless nothing else is left."""
    vocab = logits.shape[1]
    rows = jnp.arange(len(logits))[:, None]

    def column(ids: Array) -> Array:
        return jnp.where(ids >= 0, ids, vocab)

    nothing = jnp.zeros(logits.shape, jnp.float32)
    bias = nothing.at[rows, column(settings.bias_ids)].add(settings.bias, mode="drop")
    had = history.counts > 0
    penalty = settings.frequency[:, None] * history.counts + settings.presence[:, None] * had
    x = logits.astype(jnp.float32) + bias
    times = settings.repetition[:, None]
    scaled = (history.prompt | had) & (times != 1)
    x = jnp.where(scaled, jnp.where(x > 0, x / times, x * times), x) - penalty
    early = (position < settings.stop_from)[:, None] & (stop >= 0)
    waits = nothing.at[rows, jnp.where(early, stop, vocab)].set(1, mode="drop") > 0
    waits &= jnp.any(~waits & ~banned, axis=-1, keepdims=True)
    return Changed(
        logits=x,
        offset=bias - penalty,
        excluded=waits | banned,
        scaled=scaled,
    )


def kept(x: Float[Array, "B V"], settings: Settings) -> Bool[Array, "B V"]:
    """The tokens that `min_p`, then `top_k`, then `top_p` leave of softmax(x).

    Equally likely tokens rank by their ids. Only where the `WINDOW` likeliest do not settle it
    are all of them sorted.
    """
    floor = jnp.max(x, axis=-1) + jnp.log(settings.min_p)
    likely = (x > -jnp.inf) & (x >= floor[:, None])
    x = jnp.where(likely, x, -jnp.inf)
    ranked = (settings.top_k > 0) | (settings.top_p < 1)
    last = jax.lax.cond(
        jnp.any(ranked), lambda: _last_kept(x, settings, ranked), lambda: _everything(x)
    )
    value, index = (part[:, None] for part in last)
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    within = (x > value) | ((x == value) & (place <= index))
    return likely & (within | ~ranked[:, None])


def _everything(x: Array) -> tuple[Array, Array]:
    return jnp.full(len(x), -jnp.inf), jnp.full(len(x), x.shape[1], jnp.int32)


def _last_kept(
    x: Float[Array, "B V"], settings: Settings, ranked: Bool[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Logit and id of the least likely token that `top_k` and `top_p` keep."""
    vocab = x.shape[1]
    most = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)
    top = jnp.max(x, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(x - top), axis=-1)

    def found(values: Array, ids: Array) -> tuple[Array, Array, Array]:
        """Of the likeliest tokens in order; and whether these are enough to tell."""
        width = values.shape[1]
        place = jnp.arange(width)[None]
        weights = jnp.where(place < most[:, None], jnp.exp(values - top), 0.0)
        passed = jnp.cumsum(weights, axis=-1)
        mass = settings.top_p * jnp.where(most <= width, passed[:, -1], total)
        count = 1 + jnp.sum(passed < mass[:, None], axis=-1)
        count = jnp.where(settings.top_p < 1, jnp.minimum(count, most), most)
        at = jnp.minimum(count, width)[:, None] - 1
        value, index = (jnp.take_along_axis(y, at, axis=1)[:, 0] for y in (values, ids))
        return value, index, (count <= width) | (width == vocab)

    values, ids = jax.lax.top_k(x, min(WINDOW, vocab))
    value, index, settled = found(values, ids)

    def sort() -> tuple[Array, Array]:
        place = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32)[None], x.shape)
        falling, order = jax.lax.sort((-x, place), num_keys=1, is_stable=True)
        more, further, _ = found(-falling, order)
        return jnp.where(settled, value, more), jnp.where(settled, index, further)

    return jax.lax.cond(jnp.any(ranked & ~settled), sort, lambda: (value, index))
