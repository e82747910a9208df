"""Drafts of the model's prediction modules, one token at a time over keys and values of their own.

States of the model flow in with the tokens that came of them; guesses at the next tokens flow
out. Invariant: what a module keeps of a known token (keys, values and its state) is made of true
states and known tokens alone, as `models.mtp.states` makes it of the whole sequence; what it
makes of guesses is behind them and written over before it is read as known.

Module k gives token j the state ``g_k[j] = block(W [norm(embed[j]); norm(g_{k-1}[j-1])])`` with
``g_0 = h``. Where the newest token is p, the model's state at p - 1 and the token itself make
``g_1[p]``, which guesses p + 1; with that guess ``g_2[p + 1]`` guesses p + 2, and so on.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import accumulator, rotation
from forge_jax.models.mtp import advanced
from forge_jax.models.transformer import AS_STORED, Attend, Ready, embedded

# positions i32[B, T] -> attention of queries there to all up to their own
AttendAt = Callable[[Array], Attend]
# (logits [B, V], position i32[B]) -> tokens for there, i32[B]
Guess = Callable[[Array, Array], Array]


def read(
    params: dict[str, Any],
    caches: tuple[Any, ...],
    h: Float[Array, "B T E"],
    before: Float[Array, "B modules E"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend_at: AttendAt,
    cfg: ModelConfig,
    ready: Ready = AS_STORED,
) -> tuple[Float[Array, "modules B T E"], tuple[Any, ...]]:
    """What every module needs of known tokens to go on behind them, ``g_0 .. g_{modules - 1}``
    of each, and the modules' caches with the tokens in them.

    `h` are the model's states of the tokens, `before` all those of the token before the first.
    """
    attend, turned = attend_at(positions), rotation(positions, cfg, accumulator(h))
    word = embedded(params, tokens, cfg, ready)
    states, after, g = [], [], h
    for k, (weights, cache) in enumerate(zip(params["mtp"], caches, strict=True), 1):
        states.append(g)
        above = jnp.concatenate([before[:, k - 1, None], g[:, :-1]], axis=1)
        above = jnp.where((positions >= k)[..., None], above, 0)
        g, _, cache = advanced(weights, word, above, turned, attend, cfg, cache, cut=ready.cut)
        after.append(cache)
    return jnp.stack(states), tuple(after)


def draft(
    params: dict[str, Any],
    caches: tuple[Any, ...],
    h: Float[Array, "B W E"],
    before: Float[Array, "B modules-1 E"],
    tokens: Int[Array, "B W"],
    count: Int[Array, " B"],
    start: Int[Array, " B"],
    attend_at: AttendAt,
    guess: Guess,
    wanted: int,
    cfg: ModelConfig,
    ready: Ready = AS_STORED,
) -> tuple[Int[Array, "B wanted"], Float[Array, "modules B W E"], Array, tuple[Any, ...]]:
    """Guesses at the next `wanted` tokens of every row, of the first modules; those behind them
    are only kept up with what is known.

    The row's first `count` `tokens`, at positions from ``start + 1``, are known and new: `h` are
    the model's states of the tokens one before each, `before` those of all modules but the last
    at `start`. Returns the guesses, the states of tokens as in `read`, from that at `start`,
    `before` for the next time, and caches; of states only the first `count` mean anything.
    """
    width = tokens.shape[1]
    guesses: list[Array] = []
    states, ahead, after = [], [], []
    g = h  # of the tokens from `start`
    for k, (weights, cache) in enumerate(zip(params["mtp"], caches, strict=True), 1):
        size = width + (k - 1 if k <= wanted else 0)
        g = g[:, :size]
        positions = start[:, None] + 1 + jnp.arange(size)[None]
        states.append(g[:, :width])
        word = embedded(params, _tokens(tokens, count, guesses[: size - width]), cfg, ready)
        above = jnp.where((positions >= k)[..., None], g, 0)
        turned = rotation(positions, cfg, accumulator(h))
        g, normed, cache = advanced(
            weights, word, above, turned, attend_at(positions), cfg, cache, cut=ready.cut
        )
        after.append(cache)
        if k <= wanted:
            newest = transformer.logits(params, _at(normed, count + k - 2), cfg)
            guesses.append(guess(newest, start + count + k))
        if k < len(caches):
            ahead.append(_at(g, count - 1))
            g = jnp.concatenate([before[:, k - 1, None], g], axis=1)
    above = jnp.stack(ahead, axis=1) if ahead else before
    return jnp.stack(guesses, axis=1), jnp.stack(states), above, tuple(after)


def _tokens(
    tokens: Int[Array, "B W"], count: Int[Array, " B"], guesses: list[Array]
) -> Int[Array, "B W+guesses"]:
    """The known tokens of each row and the guesses right behind them."""
    wide = jnp.pad(tokens, ((0, 0), (0, len(guesses))))
    place = jnp.arange(wide.shape[1])[None]
    for i, token in enumerate(guesses):
        wide = jnp.where(place == (count + i)[:, None], token[:, None], wide)
    return wide


def _at(states: Float[Array, "B T E"], index: Int[Array, " B"]) -> Float[Array, "B E"]:
    """The state of each row at an index, or at the first."""
    return jnp.take_along_axis(states, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]
