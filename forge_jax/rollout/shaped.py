"""Draws a token a row from logits that requests have changed, and tells what it was drawn from.

Logits, settings and histories flow in; tokens, log-probs, the likeliest tokens and supports flow
out. Invariant: the log-prob is of the distribution that its support describes, and a row that
asks for nothing draws what `sampling.sample` draws.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from forge_jax.drawing import CLOSED, LOST, OPEN
from forge_jax.rollout.sampling import drawn, uniforms
from forge_jax.rollout.shaping import Changed, History, Settings, changed, kept


@dataclass(frozen=True, kw_only=True)
class Told:
    """How much is told of every draw; both are compiled in."""

    top: int  # likeliest tokens
    support: int  # tokens that a support may list; beyond, it is lost


class Draws(NamedTuple):
    """Tokens and what they were drawn from; supports as in `drawing.Support`."""

    token: Any  # i32[B]
    logp: Any  # f32[B], of the distribution that was sampled
    top_ids: Any  # i32[B, top], likeliest first, -1 where fewer can come
    top_logprobs: Any  # f32[B, top]; where greedy as if temperature were 1
    ids: Any  # i32[B, S]
    offsets: Any  # f32[B, S]
    kind: Any  # i32[B]


def draw(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    keys: Key[Array, " B"],
    position: Int[Array, " B"],
    settings: Settings,
    history: History,
    stop: Int[Array, "B N"],
    banned: Bool[Array, "B V"],
    told: Told,
) -> Draws:
    """A token for `position` of each row, with the same uniform number as `sampling.sample`."""
    greedy = temperature == 0
    after = changed(logits, settings, history, stop, position, banned)
    x = after.logits / jnp.where(greedy, 1.0, temperature)[:, None]
    x = jnp.where(after.excluded, -jnp.inf, x)
    keep = kept(x, settings)
    x = jnp.where(keep, x, -jnp.inf)
    token, logp = drawn(x, greedy, uniforms(keys, position))
    vocab = x.shape[1]
    values, ids = jax.lax.top_k(x, min(max(told.top, told.support), vocab))
    ids = jnp.where(values > -jnp.inf, ids, -1)
    top = values[:, : told.top] - jax.nn.logsumexp(x, axis=-1)[:, None]
    return Draws(token, logp, ids[:, : told.top], top, *_support(after, keep, ids, told.support))


def _support(
    after: Changed, keep: Bool[Array, "B V"], likeliest: Int[Array, "B N"], most: int
) -> tuple[Int[Array, "B S"], Float[Array, "B S"], Int[Array, " B"]]:
    """What is kept, if that is little; else what was changed, if that is, and nothing truncated.

    A logit that was multiplied has no offset that holds for other weights.
    """
    most = min(most, keep.shape[1])
    altered = (after.offset != 0) | after.excluded
    truncated = jnp.any(~keep & ~after.excluded, axis=-1)
    few, little = (jnp.sum(x, axis=-1) <= most for x in (keep, altered))
    open_ = ~truncated & little
    flags, places = jax.lax.top_k(altered.astype(jnp.float32), most)
    opened = jnp.where(flags > 0, places, -1)
    ids = jnp.where(open_[:, None], opened, likeliest[:, :most])
    kind = jnp.where(open_, OPEN, jnp.where(few, CLOSED, LOST))
    kind = jnp.where(jnp.any(after.scaled & keep, axis=-1), LOST, kind)
    ids = jnp.where((kind == LOST)[:, None], -1, ids)
    safe = jnp.maximum(ids, 0)
    offsets, out = (jnp.take_along_axis(x, safe, axis=1) for x in (after.offset, after.excluded))
    offsets = jnp.where(out, -jnp.inf, offsets)
    return ids, jnp.where(ids >= 0, offsets, 0.0), kind
