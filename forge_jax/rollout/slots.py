"""What every slot is doing, and how a packet and a sampled token change that.

Integers of a packet and states flow in, states and integers of a result flow out. Invariant: the
state of a row depends on its own packets and tokens alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from forge_jax.rollout import packets
from forge_jax.rollout.access import Access
from forge_jax.rollout.cache import Tables, before_own
from forge_jax.rollout.packets import DecodeShape
from forge_jax.rollout.sampling import raw_logprobs, request_key, sample
from forge_jax.trees import pytree


@pytree
class Slots:
    """What each slot is doing; rows are rewritten whole when a request comes."""

    token: Array  # i32[B], the newest token, not yet in the pool
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


def first_of_places(x: Array, rows: int, places: int) -> Array:
    """The states of the slots that a call of `rows` has: the first of every place."""
    if places == 1:
        return x[:rows]
    return x.reshape(places, -1, *x.shape[1:])[:, : rows // places].reshape(rows, *x.shape[1:])


def put_first(x: Array, new: Array, places: int) -> Array:
    """States of all slots with `new` ones of those that `first_of_places` gives."""
    rows = len(new)
    if places == 1:
        return x.at[:rows].set(new)
    wide = x.reshape(places, -1, *x.shape[1:])
    part = new.reshape(places, -1, *x.shape[1:])
    return wide.at[:, : rows // places].set(part).reshape(x.shape)


def unpacked(
    packed: Int[Array, " n"], shape: DecodeShape, slots: Slots, access: Access
) -> tuple[Slots, Array, Tables]:
    """The rows of a packet, those whose state is on the device from there; which ones are fresh,
    bool[B]; and its tables."""
    width = packets.HEADER + shape.own
    wide = packed[: shape.rows * width].reshape(shape.rows, width)
    shared = packed[shape.rows * width :].reshape(-1, 1 + shape.shared)
    header = wide[:, : packets.HEADER]
    state = header[:, packets.STATE]
    kept = jax.tree.map(lambda x: first_of_places(x, shape.rows, shape.places), slots)

    def chosen(old: Array, new: Array) -> Array:
        fresh = (state == packets.FRESH).reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(fresh, new, old)

    own, common = access.local(wide[:, packets.HEADER :]), access.local(shared[:, 1:])
    tables = Tables(own=own, shared=common, pages=shared[:, 0])
    rows, empty = jax.tree.map(chosen, kept, _fresh(header)), state == packets.EMPTY
    rows = dataclasses.replace(
        rows,
        active=rows.active & ~empty,
        # Its own table has scratch alone: that is where it writes.
        position=jnp.where(empty, before_own(tables, access.page), rows.position),
    )
    return rows, state == packets.FRESH, tables


def _fresh(header: Int[Array, "B C"]) -> Slots:
    """Rows of requests that begin, or go on from what is known of them."""
    return Slots(
        token=header[:, packets.TOKEN],
        position=header[:, packets.POSITION],
        left=header[:, packets.LIMIT],
        active=header[:, packets.LIMIT] > 0,
        key=request_key(
            header[:, packets.SEED_HIGH], header[:, packets.SEED_LOW], header[:, packets.CHOICE]
        ),
        temperature=jax.lax.bitcast_convert_type(header[:, packets.TEMPERATURE], jnp.float32),
        stop=header[:, packets.STOP :],
    )


def drawn(logits: Float[Array, "B V"], rows: Slots) -> tuple[Slots, Int[Array, "B 4"]]:
    """Samples the token after each row's newest one, and packs token, log-probs and status."""
    position = rows.position + 1
    token, logp = sample(logits, rows.temperature, rows.key, position)
    raw = raw_logprobs(logits, token, logp, rows.temperature)
    return advanced(rows, token, logp, raw)


def advanced(
    rows: Slots, token: Int[Array, " B"], logp: Float[Array, " B"], raw: Float[Array, " B"]
) -> tuple[Slots, Int[Array, "B 4"]]:
    """The rows after a sampled token, and its packet."""
    position = rows.position + 1
    stopped = jnp.any(token[:, None] == rows.stop, axis=-1)
    left = rows.left - 1
    ended = jnp.where(stopped, packets.STOPPED, packets.EXHAUSTED)
    status = jnp.where(stopped | (left <= 0), ended, packets.GOES_ON)
    active = rows.active
    after = dataclasses.replace(
        rows,
        token=jnp.where(active, token, rows.token),
        position=jnp.where(active, position, rows.position),
        left=jnp.where(active, left, rows.left),
        active=active & (status == packets.GOES_ON),
    )
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (logp, raw))
    return after, jnp.stack([token, *bits, jnp.where(active, status, packets.IDLE)], axis=-1)
