"""The compiled decode steps of calls in which some request changes its logits.

As `programs.decode`, of fewer shapes, and without drafts: settings and all known tokens of the
rows come with every call, so that nothing of them stays on the device. Invariant: a row that
asks for nothing samples what it would in `programs.decode`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import packets
from forge_jax.rollout.access import Pool, access_to
from forge_jax.rollout.cache import attention_at, before_own, closed, opened
from forge_jax.rollout.packets import DecodeShape, Sampled
from forge_jax.rollout.programs import recorded, traces
from forge_jax.rollout.shaped import Draws, Told, draw
from forge_jax.rollout.shaping import History, Settings, history_of
from forge_jax.rollout.slots import Slots, advanced, put_first, unpacked
from forge_jax.trees import pytree


@partial(
    jax.jit,
    static_argnames=("cfg", "shape", "told", "attention", "routes", "mesh"),
    donate_argnames=("pool", "slots"),
)
def decode(
    params: dict[str, Any],
    pool: Pool,
    slots: Slots,
    packed: Int[Array, " n"],
    *,
    cfg: ModelConfig,
    shape: DecodeShape,
    told: Told,
    attention: str = "xla",
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Pool, Slots, Sampled]:
    """`programs.decode` of a packet that `packets.pack_settings` ends."""
    traces["decode"] += 1
    access = access_to(pool, shape, attention, mesh)
    width = shape.settings(access.page)
    rows, _, tables = unpacked(packed[: -shape.rows * width], shape, slots, access)
    wide = packed[-shape.rows * width :].reshape(shape.rows, width)
    settings, grammar, history = _asked(wide, shape, cfg.vocab)
    first = rows.position - before_own(tables, access.page)

    def step(number: Array, carry: tuple[Any, Slots, History]) -> tuple[Any, Sampled]:
        cache, rows, history = carry
        rows = dataclasses.replace(rows, active=rows.active & (number < grammar.steps))
        positions = rows.position[:, None]
        attend = attention_at(positions, tables, access)
        h, cache, routing = transformer.hidden(
            params, rows.token[:, None], positions, attend, cfg, cache, ready=access.ready
        )
        logits = transformer.logits(params, h[:, 0], cfg)
        banned = _banned(grammar, number, cfg.vocab)
        rows, history, packet, draws = _drawn(logits, rows, settings, history, banned, told)
        chosen = jnp.swapaxes(recorded(routing, cfg), 0, 1) if routes else None
        draws = jax.tree.map(lambda x: x[None], draws)
        return (cache, rows, history), Sampled(packet[None], chosen, draws)

    layers, modules = pool[: cfg.layers], pool[cfg.layers :]  # which draft nothing here
    cache: Any = layers if access.direct else opened(layers, tables, access)
    carry = (cache, rows, history)
    # As a scan of all steps, but of those alone that some row takes part in.
    (cache, rows, _), results = _repeated(step, carry, jnp.max(grammar.steps), shape.steps)
    if not access.direct:
        cache = closed(layers, cache, tables, first, shape.steps, access)
    slots = jax.tree.map(lambda old, new: put_first(old, new, shape.places), slots, rows)
    return (*cache, *modules), access.pinned(slots), results


@pytree
class Grammar:
    """What the grammar of each row says of the steps of a call."""

    steps: Array  # i32[B], in which the row takes part
    forced: Array  # i32[B, K], the token of a step, -1 where there is a choice
    allowed: Array  # bool[B, V], what there is to choose from


def _banned(grammar: Grammar, number: Array, vocab: int) -> Bool[Array, "B V"]:
    """Tokens that cannot come in a step."""
    forced = jnp.take(grammar.forced, number, axis=1)[:, None]
    others = jnp.arange(vocab, dtype=jnp.int32)[None] != forced
    return jnp.where(forced >= 0, others, ~grammar.allowed)


def _repeated(step: Callable[..., Any], carry: Any, count: Array, most: int) -> tuple[Any, Any]:
    """The carry after `count` steps, and the results of `most`, zeros where there were none."""
    results = jax.tree.map(
        lambda x: jnp.zeros((most, *x.shape), x.dtype), jax.eval_shape(step, count, carry)[1]
    )

    def one(number: Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, result = step(number, both[0])
        return carry, jax.tree.map(lambda x, new: x.at[number].set(new), both[1], result)

    return jax.lax.fori_loop(0, count, one, (carry, results))


def _asked(
    wide: Int[Array, "B C"], shape: DecodeShape, vocab: int
) -> tuple[Settings, Grammar, History]:
    floats = jax.lax.bitcast_convert_type(wide, jnp.float32)
    ids, bias = (x[:, packets.SETTINGS :] for x in (wide, floats))
    behind = 2 * packets.BIASES, shape.steps, shape.words
    _, forced, words, tokens = jnp.split(ids, [*itertools.accumulate(behind)], axis=1)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    grammar = Grammar(
        steps=wide[:, packets.STEPS],
        forced=forced,
        allowed=bits.reshape(len(wide), -1)[:, :vocab] > 0,
    )
    settings = Settings(
        top_k=wide[:, packets.TOP_K],
        top_p=floats[:, packets.TOP_P],
        min_p=floats[:, packets.MIN_P],
        presence=floats[:, packets.PRESENCE],
        frequency=floats[:, packets.FREQUENCY],
        repetition=floats[:, packets.REPETITION],
        stop_from=wide[:, packets.STOP_FROM],
        bias_ids=ids[:, : packets.BIASES],
        bias=jnp.where(
            ids[:, : packets.BIASES] >= 0, bias[:, packets.BIASES : 2 * packets.BIASES], 0.0
        ),
    )
    return settings, grammar, history_of(tokens, wide[:, packets.PROMPT], vocab)


def _drawn(
    logits: Float[Array, "B V"],
    rows: Slots,
    settings: Settings,
    history: History,
    banned: Bool[Array, "B V"],
    told: Told,
) -> tuple[Slots, History, Int[Array, "B 4"], Draws]:
    """A token after each row's newest one."""
    position = rows.position + 1
    draws = draw(
        logits, rows.temperature, rows.key, position, settings, history, rows.stop, banned, told
    )
    x = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(x, draws.token[:, None], axis=1)[:, 0]
    raw = chosen - jax.nn.logsumexp(x, axis=1)
    new = rows.active[:, None] & (
        jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == draws.token[:, None]
    )
    history = dataclasses.replace(history, counts=history.counts + new)
    rows, packet = advanced(rows, draws.token, draws.logp, raw)
    return rows, history, packet, draws
