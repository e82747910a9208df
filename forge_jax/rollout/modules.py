"""What the engine keeps so that prediction modules can draft: guesses of slots, states of pages.

States of the model flow in from prefill and decode, drafts flow out. The modules' keys and values
lie in the pool, behind those of the model's layers. Invariant: the tail of a page holds the
states of the last token that was read into it, so that whoever goes on behind that token, in
whatever slot and by whatever call, goes on from true states.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from forge_jax.models.config import ModelConfig
from forge_jax.models.transformer import Attend
from forge_jax.rollout.access import ROWS, Access, Pool
from forge_jax.rollout.cache import Tables, Views, before_own, beside, prefill_attend
from forge_jax.rollout.drafting import AttendAt, Guess, draft, read
from forge_jax.rollout.packets import SCRATCH
from forge_jax.rollout.slots import first_of_places, put_first
from forge_jax.rollout.verify import NO_DRAFT
from forge_jax.trees import pytree


@pytree
class Drafting:
    """What the modules go on from."""

    drafts: Array  # i32[slots, modules], for the next positions, `NO_DRAFT` where there is none
    above: Array  # [slots, modules - 1, E], states g_1, g_2, ... of the newest token
    tails: Array  # [P, modules, E], states h, g_1, ... of the last token of each page


def empty_drafting(
    slots: int,
    pages: int,
    modules: int,
    cfg: ModelConfig,
    dtype: Any,
    pool: Sharding | None = None,
) -> Drafting:
    """No drafts, and states of nothing, dealt out as the pages of `pool`."""
    where = None if pool is None else beside(pool)
    return Drafting(
        drafts=jnp.full((slots, modules), NO_DRAFT, jnp.int32, device=where),
        above=jnp.zeros((slots, modules - 1, cfg.embed), dtype, device=where),
        tails=jnp.zeros((pages, modules, cfg.embed), dtype, device=where),
    )


class Spans(NamedTuple):
    """What a prefill call reads."""

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    table: Int[Array, "R C"]
    real: Bool[Array, "R T"]  # tokens of a row that are not padding come first


class Window(NamedTuple):
    """What a verify found out."""

    h: Float[Array, "B W E"]  # the model's states of the tokens fed: the newest, then drafts
    tokens: Int[Array, "B W"]  # sampled after each
    size: Int[Array, " B"]  # tokens of them that really were
    start: Int[Array, " B"]  # position of the first token fed


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a decode call is asked."""

    tables: Tables
    access: Access
    attend_at: AttendAt
    drafts: int  # γ, at least 1
    guess: Guess
    cfg: ModelConfig


def prefilled(
    params: dict[str, Any],
    pool: Pool,
    state: Drafting,
    h: Float[Array, "R T E"],
    spans: Spans,
    cfg: ModelConfig,
    access: Access,
) -> tuple[Pool, Drafting]:
    """The modules' part of the pool, and tails, after the model's states of what was read."""
    tokens, positions, table, real = spans
    page, tails = access.page, state.tails
    last = jnp.maximum(positions[:, :1] - 1, 0) // page
    before = _tails_of(tails, jnp.take_along_axis(table, last, axis=1)[:, 0], access)

    def attend_at(positions: Array) -> Attend:
        return prefill_attend(table, positions, real, access)

    states, pool = read(params, pool, h, before, tokens, positions, attend_at, cfg, access.ready)
    count = jnp.sum(real, axis=1, keepdims=True)
    ends = real & ((positions % page == page - 1) | (jnp.cumsum(real, axis=1) == count))
    index = jnp.where(ends, positions // page, 0)
    target = jnp.where(ends, jnp.take_along_axis(table, index, axis=1), SCRATCH)
    tails = _put_tails(tails, target, states.transpose(1, 2, 0, 3), access)
    return pool, dataclasses.replace(state, tails=tails)


def _tails_of(tails: Array, pages: Int[Array, " B"], access: Access) -> Array:
    """Tails of a page of every row."""
    return access.each(lambda tails, pages: tails[pages], (ROWS, ROWS), ROWS)(tails, pages)


def _put_tails(tails: Array, pages: Int[Array, "B ..."], new: Array, access: Access) -> Array:
    """Tails with `new` ones [B, ..., modules, E] of pages of every row."""

    def put(tails: Array, pages: Array, new: Array) -> Array:
        return tails.at[pages].set(new)

    return access.each(put, (ROWS,) * 3, ROWS)(tails, pages, new.astype(tails.dtype))


def begun(
    params: dict[str, Any],
    views: tuple[Views, ...],
    state: Drafting,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    given: Given,
) -> tuple[tuple[Views, ...], Drafting]:
    """First drafts of the rows that are fresh: no module has read their newest token."""
    last = page_of(jnp.maximum(position - 1, 0) // given.access.page, given.tables)
    before = _tails_of(state.tails, last, given.access)
    seen = Window(before[:, :1], token[:, None], fresh.astype(jnp.int32), position - 1)

    def some() -> tuple[tuple[Views, ...], Drafting]:
        return _drafted(params, views, state, before[:, 1:], seen, given)

    return jax.lax.cond(jnp.any(fresh), some, lambda: (views, state))


def followed(
    params: dict[str, Any],
    views: tuple[Views, ...],
    state: Drafting,
    seen: Window,
    given: Given,
) -> tuple[tuple[Views, ...], Drafting]:
    """The next drafts of the rows that sampled something."""
    above = first_of_places(state.above, len(seen.size), given.access.places)
    return _drafted(params, views, state, above, seen, given)


def _drafted(
    params: dict[str, Any],
    views: tuple[Views, ...],
    state: Drafting,
    above: Float[Array, "B modules-1 E"],
    seen: Window,
    given: Given,
) -> tuple[tuple[Views, ...], Drafting]:
    """`above` are the modules' states of the token at ``seen.start``."""

    drafts, states, ahead, views = draft(
        params,
        views,
        seen.h,
        above,
        seen.tokens,
        seen.size,
        seen.start,
        given.attend_at,
        given.guess,
        given.drafts,
        given.cfg,
        given.access.ready,
    )
    rows = len(seen.size)
    missing = jnp.full((rows, state.drafts.shape[1] - given.drafts), NO_DRAFT, jnp.int32)
    drafts, sampled = jnp.concatenate([drafts, missing], axis=1), seen.size > 0

    def kept(old: Array, new: Array) -> Array:
        known = sampled.reshape(-1, *[1] * (new.ndim - 1))
        here = first_of_places(old, rows, given.access.places)
        return put_first(old, jnp.where(known, new.astype(old.dtype), here), given.access.places)

    return views, Drafting(
        drafts=kept(state.drafts, drafts),
        above=kept(state.above, ahead),
        tails=_tails(state.tails, states, seen, given.tables, given.access),
    )


def page_of(index: Int[Array, " B"], tables: Tables) -> Int[Array, " B"]:
    """The page that holds pages number `index` of every row's sequence, shared or its own."""
    bundles, rows = len(tables.pages), len(index)
    count = jnp.repeat(tables.pages, rows // bundles, total_repeat_length=rows)
    behind = jnp.clip(index - count, 0, tables.own.shape[1] - 1)
    own = jnp.take_along_axis(tables.own, behind[:, None], axis=1)[:, 0]
    if not tables.shared.shape[1]:
        return own
    shared = jnp.repeat(tables.shared, rows // bundles, axis=0, total_repeat_length=rows)
    index = jnp.minimum(index, shared.shape[1] - 1)
    return jnp.where(index < count, jnp.take_along_axis(shared, index[:, None], axis=1)[:, 0], own)


def _tails(
    tails: Float[Array, "P modules E"],
    states: Float[Array, "modules B W E"],
    seen: Window,
    tables: Tables,
    access: Access,
) -> Float[Array, "P modules E"]:
    """Tails with those of pages whose last token is among the `seen.size` from `seen.start`.

    At most one of each row is, since a window is no longer than a page.
    """
    page = access.page
    assert states.shape[2] <= page, "a window is longer than a page"
    away = page - 1 - seen.start % page
    ends = away < seen.size
    index = (seen.start - before_own(tables, page) + away) // page
    inside = ends & (index >= 0) & (index < tables.own.shape[1])
    index = jnp.where(inside, index, 0)[:, None]
    target = jnp.where(inside, jnp.take_along_axis(tables.own, index, axis=1)[:, 0], SCRATCH)
    place = jnp.where(ends, away, 0)[None, :, None, None]
    last = jnp.take_along_axis(states, place, axis=2)[:, :, 0]  # [modules, B, E]
    return _put_tails(tails, target, jnp.swapaxes(last, 0, 1), access)
