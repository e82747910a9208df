"""The compiled programs of the engine: prefill, a block of decode steps, and publishing.

Weights, cache, slot states and packed prompts flow in; cache and states (both donated) and one
packed result flow out. Invariant: a row's result depends on its own row alone, so a request
gets the same bits whatever its slot and its neighbours.
"""

import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from forge_jax.collectives import Cut
from forge_jax.models import layout, transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.moe import Routing
from forge_jax.rollout import packets
from forge_jax.rollout.cache import decode_attend, prefill_attend
from forge_jax.rollout.packets import Sampled
from forge_jax.rollout.sampling import request_key, sample
from forge_jax.trees import pytree
from forge_jax.types import route_dtype

traces: Counter[str] = Counter()  # how often each program was traced; constant once all are warm


@pytree
class Slots:
    """What each slot is doing; rows are rewritten whole on admission."""

    token: Array  # i32[B], the newest token, not yet in the cache
    position: Array  # i32[B], its position
    left: Array  # i32[B], tokens that may still be sampled
    active: Array  # bool[B]
    key: Key[Array, " B"]  # of the request and choice
    temperature: Array  # f32[B]
    stop: Array  # i32[B, STOP_IDS], -1 where unused


def empty_slots(size: int) -> Slots:
    """`size` idle slots."""
    zeros = jnp.zeros(size, jnp.int32)
    return Slots(
        token=zeros,
        position=jnp.zeros(size, jnp.int32),
        left=jnp.zeros(size, jnp.int32),
        active=jnp.zeros(size, bool),
        key=request_key(zeros, zeros, zeros),
        temperature=jnp.ones(size, jnp.float32),
        stop=jnp.full((size, packets.STOP_IDS), -1, jnp.int32),
    )


@partial(jax.jit, static_argnames=("cfg", "routes", "mesh"), donate_argnames=("cache", "slots"))
def prefill(
    params: dict[str, Any],
    cache: Any,
    slots: Slots,
    packed: Int[Array, "R C"],
    *,
    cfg: ModelConfig,
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Any, Slots, Sampled]:
    """Reads R prompts into their slots and samples the first token of each.

    `packed` is laid out by `packets.pack_prefill`; a row whose slot does not exist is padding.
    With `routes` the experts of all tokens come out too. `mesh`, of Auto axes, is that of the
    arrays.
    """
    traces["prefill"] += 1
    header, tokens = packed[:, : packets.HEADER], packed[:, packets.HEADER :]
    slot, length = header[:, packets.SLOT], header[:, packets.LENGTH]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    attend = prefill_attend(slot)
    h, cache, routing = transformer.hidden(
        params, tokens, positions, attend, cfg, cache, ready=_ready(mesh)
    )
    h = jnp.take_along_axis(h, (length - 1)[:, None, None], axis=1)[:, 0]
    newest = jnp.take_along_axis(tokens, (length - 1)[:, None], axis=1)[:, 0]
    rows, result = _draw(transformer.logits(params, h, cfg), _admitted(header, newest))
    slots = jax.tree.map(lambda old, new: old.at[slot].set(new, mode="drop"), slots, rows)
    return cache, slots, Sampled(result, _recorded(routing, cfg) if routes else None)


@partial(
    jax.jit, static_argnames=("cfg", "steps", "routes", "mesh"), donate_argnames=("cache", "slots")
)
def decode(
    params: dict[str, Any],
    cache: Any,
    slots: Slots,
    *,
    cfg: ModelConfig,
    steps: int,
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Any, Slots, Sampled]:
    """Samples up to `steps` tokens in every active slot, with the experts of those before them
    where `routes` are asked for.

    A slot whose request has gone runs on until its limit or the next admission: it costs
    nothing, since every slot is computed anyway.
    """
    traces["decode"] += 1

    def step(carry: tuple[Any, Slots], _: None) -> tuple[tuple[Any, Slots], Sampled]:
        cache, slots, result = decode_step(params, *carry, cfg, routes, mesh)
        return (cache, slots), result

    (cache, slots), results = jax.lax.scan(step, (cache, slots), length=steps)
    return cache, slots, results


def decode_step(
    params: dict[str, Any],
    cache: Any,
    slots: Slots,
    cfg: ModelConfig,
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Any, Slots, Sampled]:
    """Samples one token in every active slot; the row of an idle slot changes nothing."""
    attend = decode_attend(slots.position)
    h, cache, routing = transformer.hidden(
        params, slots.token, slots.position, attend, cfg, cache, ready=_ready(mesh)
    )
    slots, result = _draw(transformer.logits(params, h, cfg), slots)
    return cache, slots, Sampled(result, _recorded(routing, cfg) if routes else None)


def _ready(mesh: Mesh | None) -> transformer.Ready:
    return transformer.Ready(cut=Cut(spread=mesh))


def _recorded(routing: Routing | None, cfg: ModelConfig) -> Int[Array, "... layers k"]:
    """The experts of each token in all layers."""
    assert routing is not None, "routes of a model without experts"
    return jnp.moveaxis(routing.experts, 0, -2).astype(route_dtype(cfg.experts))


@partial(jax.jit, static_argnames=("cfg", "dtype"))
def publish(
    params: dict[str, Any], *, cfg: ModelConfig, dtype: str | None = None
) -> dict[str, Any]:
    """A copy of stacked parameters with layers as a tuple, as decoding wants them, in `dtype`
    where that is said; scores of experts stay as exact as they are. Prediction modules, with
    which the engine does not draft, are left out.

    The copy shares no buffer with its source, so the source may be donated.
    """
    traces["publish"] += 1

    def copied(path: Any, x: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        kept = dtype is None or name in layout.UNROUNDED
        # Said outright, so as not to rest on what jit does with outputs that are inputs.
        return jnp.copy(x if kept else x.astype(dtype))

    used = {name: tree for name, tree in params.items() if name != "mtp"}
    return layout.unstack(jax.tree_util.tree_map_with_path(copied, used), cfg)


def _admitted(header: Int[Array, "R C"], last: Int[Array, " R"]) -> Slots:
    """Slot rows of prompts just read, before their first token."""
    return Slots(
        token=last,
        position=header[:, packets.LENGTH] - 1,
        left=header[:, packets.LIMIT],
        active=header[:, packets.LIMIT] > 0,
        key=request_key(
            header[:, packets.SEED_HIGH], header[:, packets.SEED_LOW], header[:, packets.CHOICE]
        ),
        temperature=jax.lax.bitcast_convert_type(header[:, packets.TEMPERATURE], jnp.float32),
        stop=header[:, packets.STOP :],
    )


def _draw(logits: Float[Array, "B V"], slots: Slots) -> tuple[Slots, Int[Array, "B 3"]]:
    """Samples the token after each slot's newest one, and packs (token, log-prob, status)."""
    position = slots.position + 1
    token, logp = sample(logits, slots.temperature, slots.key, position)
    stopped = jnp.any(token[:, None] == slots.stop, axis=-1)
    left = slots.left - 1
    ended = jnp.where(stopped, packets.STOPPED, packets.EXHAUSTED)
    status = jnp.where(stopped | (left <= 0), ended, packets.GOES_ON)
    active = slots.active
    after = dataclasses.replace(
        slots,
        token=jnp.where(active, token, slots.token),
        position=jnp.where(active, position, slots.position),
        left=jnp.where(active, left, slots.left),
        active=active & (status == packets.GOES_ON),
    )
    bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
    return after, jnp.stack([token, bits, jnp.where(active, status, packets.IDLE)], axis=-1)
