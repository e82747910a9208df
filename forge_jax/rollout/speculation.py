"""What drafts tokens for decode to verify: nothing, the model's modules, or earlier text.

A drafter is a record on the device; the functions here are what prefill and decode ask of it,
whichever it is. Invariant: it decides how many tokens a step samples and never which.
"""

import dataclasses
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import modules, ngram
from forge_jax.rollout.access import Access, Pool
from forge_jax.rollout.cache import Views, beside
from forge_jax.rollout.modules import Drafting, Given, Spans, Window
from forge_jax.rollout.sampling import sample
from forge_jax.rollout.slots import first_of_places, put_first
from forge_jax.rollout.verify import NO_DRAFT
from forge_jax.trees import pytree


@pytree
class Said:
    """Of every slot earlier completions of its prompt, and then its own sequence."""

    rows: Array  # i32[slots, 2 context], half of it each, `ngram.NOTHING` where no token is


Drafter = Drafting | Said | None


def empty_drafter(
    rollout: RolloutConfig, cfg: ModelConfig, dtype: Any, pool: Sharding | None = None
) -> Drafter:
    """The drafter of an engine of these sizes, which has seen nothing, beside a pool that is dealt
    out as `pool` says."""
    if rollout.speculate == "mtp":
        sizes = (rollout.slots, rollout.pool_pages, rollout.modules)
        return modules.empty_drafting(*sizes, cfg, dtype, pool)
    if rollout.speculate == "ngram":
        shape = (rollout.slots, 2 * rollout.context)
        where = None if pool is None else beside(pool)
        return Said(rows=jnp.full(shape, ngram.NOTHING, jnp.int32, device=where))
    return None


def renewed(drafter: Drafter) -> Drafter:
    """The drafter when weights have changed: what old modules guessed is not proposed any more."""
    if not isinstance(drafter, Drafting):
        return drafter
    return dataclasses.replace(drafter, drafts=jnp.full_like(drafter.drafts, NO_DRAFT))


def layers_read(drafter: Drafter, drafts: int, cfg: ModelConfig) -> int:
    """Layers of the pool that a decode call of `drafts` drafts reads, modules among them."""
    return cfg.layers + (drafter.above.shape[1] + 1 if _asked(drafter, drafts) else 0)


def prefilled(
    params: dict[str, Any],
    pool: Pool,
    drafter: Drafter,
    h: Float[Array, "R T E"],
    spans: Spans,
    cfg: ModelConfig,
    access: Access,
) -> tuple[Pool, Drafter]:
    """The modules' part of the pool, if there is one, and the drafter after a prefill call."""
    if isinstance(drafter, Drafting):
        return modules.prefilled(params, pool, drafter, h, spans, cfg, access)
    return pool, drafter


def unpacked(
    packed: Int[Array, " n"], drafter: Drafter, rows: int
) -> tuple[Int[Array, " m"], Int[Array, "B S"] | None]:
    """A packet without what is at its end for the drafter, and that."""
    if not isinstance(drafter, Said):
        return packed, None
    size = rows * drafter.rows.shape[1]
    return packed[:-size], packed[-size:].reshape(rows, -1)


def begun(
    params: dict[str, Any],
    views: tuple[Views, ...],
    drafter: Drafter,
    rows: Any,
    fresh: Bool[Array, " B"],
    known: Int[Array, "B S"] | None,
    given: Given,
) -> tuple[tuple[Views, ...], Drafter]:
    """Views and drafter when the fresh rows of a call are in their slots; `known` is what the
    packet had for the drafter."""
    if isinstance(drafter, Said):
        assert known is not None, "a packet without what was said"
        places = given.access.places
        old = first_of_places(drafter.rows, len(fresh), places)
        new = jnp.where(fresh[:, None], known, old)
        return views, Said(rows=put_first(drafter.rows, new, places))
    if not _asked(drafter, given.drafts):
        return views, drafter
    model, own = views[: given.cfg.layers], views[given.cfg.layers :]
    own, drafter = modules.begun(params, own, drafter, rows.token, rows.position, fresh, given)
    return (*model, *own), drafter


def proposed(drafter: Drafter, rows: Any, drafts: int, places: int = 1) -> Int[Array, "B drafts"]:
    """Guesses at the next tokens of rows."""
    size = len(rows.token)
    if isinstance(drafter, Said) and drafts:
        said = first_of_places(drafter.rows, size, places)
        return ngram.lookup(said, _end(drafter, rows.position), drafts)
    if isinstance(drafter, Drafting):
        return first_of_places(drafter.drafts, size, places)[:, :drafts]
    return jnp.zeros((size, 0), jnp.int32)


def guessed(logits: Float[Array, "B V"], position: Int[Array, " B"], rows: Any) -> Array:
    """Tokens that modules propose: drawn with the very randomness of the tokens they stand for,
    which are then the same where the distributions are."""
    return sample(logits, rows.temperature, rows.key, position)[0]


def followed(
    params: dict[str, Any],
    views: tuple[Views, ...],
    drafter: Drafter,
    seen: Window,
    given: Given,
) -> tuple[tuple[Views, ...], Drafter]:
    """Views and drafter after a step."""
    if isinstance(drafter, Said):
        places = given.access.places
        said = first_of_places(drafter.rows, len(seen.size), places)
        new = ngram.said(said, _end(drafter, seen.start), seen.tokens, seen.size)
        return views, Said(rows=put_first(drafter.rows, new, places))
    if not _asked(drafter, given.drafts):
        return views, drafter
    model, own = views[: given.cfg.layers], views[given.cfg.layers :]
    own, drafter = modules.followed(params, own, drafter, seen, given)
    return (*model, *own), drafter


def _asked(drafter: Drafter, drafts: int) -> TypeGuard[Drafting]:
    """The drafter is made of modules and is to draft."""
    return isinstance(drafter, Drafting) and drafts > 0


def _end(drafter: Said, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """Where rows end whose newest token is at a position of its sequence."""
    return drafter.rows.shape[1] // 2 + position + 1
