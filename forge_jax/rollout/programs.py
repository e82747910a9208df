"""The compiled programs of the engine: prefill, a block of decode steps, and publishing.

Weights, pool, slot states and packets flow in; pool and states (both donated) and one packed
result flow out. Prefill makes keys and values and samples nothing: whatever is known of a
sequence, all but its last token is read that way, and the last one is fed by the first decode
step. Invariant: a row's result depends on its own row alone, whatever its slot and neighbours.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from forge_jax.models import layout, transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.moe import Routing
from forge_jax.rollout import packets, speculation
from forge_jax.rollout.access import Access, Pool, access_to
from forge_jax.rollout.cache import (
    Tables,
    attention_at,
    before_own,
    closed,
    opened,
    prefill_attend,
)
from forge_jax.rollout.modules import Given, Spans, Window
from forge_jax.rollout.packets import DecodeShape, PrefillShape, Sampled
from forge_jax.rollout.slots import Slots, drawn, put_first, unpacked
from forge_jax.rollout.speculation import Drafter
from forge_jax.rollout.tracing import traces as traces
from forge_jax.rollout.verify import verified
from forge_jax.types import route_dtype


@partial(
    jax.jit,
    static_argnames=("cfg", "shape", "attention", "routes", "mesh"),
    donate_argnames=("pool", "drafter"),
)
def prefill(
    params: dict[str, Any],
    pool: Pool,
    drafter: Drafter,
    packed: Int[Array, "R C"],
    *,
    cfg: ModelConfig,
    shape: PrefillShape,
    attention: str = "xla",
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Pool, Drafter, Int[Array, "R T layers k"] | None]:
    """Writes keys and values of R spans of tokens, laid out by `packets.pack_prefill`.

    With `routes` the experts of the tokens come out. `mesh`, of Auto axes, is that of the arrays.
    """
    traces["prefill"] += 1
    pool, drafter, _, routing = spans_read(
        params, pool, drafter, packed, cfg, shape, attention, mesh
    )
    return pool, drafter, recorded(routing, cfg) if routes else None


def spans_read(
    params: dict[str, Any],
    pool: Pool,
    drafter: Drafter,
    packed: Int[Array, "R C"],
    cfg: ModelConfig,
    shape: PrefillShape,
    attention: str,
    mesh: Mesh | None,
) -> tuple[Pool, Drafter, Float[Array, "R T E"], Routing | None]:
    """What `prefill` does, and the states of the last layer after each token."""
    access = access_to(pool, shape, attention, mesh)
    start, length = packed[:, packets.START], packed[:, packets.LENGTH]
    table = access.local(packed[:, packets.PREFILL_HEADER :][:, : shape.pages])
    tokens = packed[:, packets.PREFILL_HEADER + shape.pages :][:, : shape.tokens]
    place = jnp.arange(shape.tokens, dtype=jnp.int32)[None]
    positions = start[:, None] + place
    spans = Spans(tokens, positions, table, place < length[:, None])
    attend = prefill_attend(table, positions, spans.real, access)
    layers, modules = pool[: cfg.layers], pool[cfg.layers :]
    h, layers, routing = transformer.hidden(
        params, tokens, positions, attend, cfg, layers, ready=access.ready
    )
    modules, drafter = speculation.prefilled(params, modules, drafter, h, spans, cfg, access)
    return layers + modules, access.pinned(drafter), h, routing


@partial(
    jax.jit,
    static_argnames=("cfg", "shape", "attention", "routes", "mesh"),
    donate_argnames=("pool", "slots", "drafter"),
)
def decode(
    params: dict[str, Any],
    pool: Pool,
    slots: Slots,
    drafter: Drafter,
    packed: Int[Array, " n"],
    *,
    cfg: ModelConfig,
    shape: DecodeShape,
    attention: str = "xla",
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Pool, Slots, Drafter, Sampled]:
    """Samples up to ``steps`` windows in every row of a packet of `packets.pack_decode`.

    Rows that the packet has nothing in do nothing, whatever they did before. With
    ``attention="pallas"`` pages are read where they are; with "xla" they are gathered first,
    once for all steps.
    """
    traces["decode"] += 1
    access = access_to(pool, shape, attention, mesh)
    packed, known = speculation.unpacked(packed, drafter, shape.rows)
    rows, fresh, tables = unpacked(packed, shape, slots, access)
    first = rows.position - before_own(tables, access.page)
    layers = speculation.layers_read(drafter, shape.drafts, cfg)
    given = Given(
        tables=tables,
        access=access,
        attend_at=partial(attention_at, tables=tables, access=access),
        drafts=shape.drafts,
        guess=partial(speculation.guessed, rows=rows),
        cfg=cfg,
    )
    direct = access.direct
    cache: Any = pool[:layers] if direct else opened(pool[:layers], tables, access)
    cache, drafter = speculation.begun(params, cache, drafter, rows, fresh, known, given)

    def step(carry: tuple[Any, Slots, Drafter], _: None) -> tuple[Any, Sampled]:
        cache, rows, drafter = carry
        drafts = speculation.proposed(drafter, rows, shape.drafts, shape.places)
        seen, cache, after, result = decode_step(
            params, cache, rows, drafts, tables, access, cfg, routes
        )
        cache, drafter = speculation.followed(params, cache, drafter, seen, given)
        return (cache, after, drafter), result

    (cache, rows, drafter), results = jax.lax.scan(step, (cache, rows, drafter), length=shape.steps)
    # Modules read the newest token too, which the model does in the next call.
    count = shape.steps * (1 + shape.drafts) + (layers > cfg.layers)
    read = cache if direct else closed(pool[:layers], cache, tables, first, count, access)
    pool = (*read, *pool[layers:])
    slots = jax.tree.map(lambda old, new: put_first(old, new, shape.places), slots, rows)
    return pool, access.pinned(slots), access.pinned(drafter), results


def decode_step(
    params: dict[str, Any],
    cache: Any,
    rows: Slots,
    drafts: Int[Array, "B W-1"],
    tables: Tables,
    access: Access,
    cfg: ModelConfig,
    routes: bool = False,
) -> tuple[Window, Any, Slots, Sampled]:
    """Samples a window of tokens in every active row, as many as its drafts are right for; the
    row of an idle one changes nothing.

    `cache` is the pool where access is `direct`, else what `opened` has made of it; the part
    of modules is left alone.
    """
    tokens = jnp.concatenate([rows.token[:, None], jnp.maximum(drafts, 0)], axis=1)
    positions = rows.position[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attend = attention_at(positions, tables, access)
    h, layers, routing = transformer.hidden(
        params, tokens, positions, attend, cfg, cache[: cfg.layers], ready=access.ready
    )
    logits = transformer.logits(params, jnp.swapaxes(h, 0, 1), cfg)  # [W, B, V]
    after, packet = verified(logits, drafts, rows, drawn)
    sampled = jnp.swapaxes(packet[..., packets.SAMPLED], 0, 1)
    seen = Window(h, sampled, after.position - rows.position, rows.position)
    chosen = jnp.swapaxes(recorded(routing, cfg), 0, 1) if routes else None
    return seen, (*layers, *cache[cfg.layers :]), after, Sampled(packet, chosen)


def recorded(routing: Routing | None, cfg: ModelConfig) -> Int[Array, "... layers k"]:
    """The experts of each token in all layers."""
    assert routing is not None, "routes of a model without experts"
    return jnp.moveaxis(routing.experts, 0, -2).astype(route_dtype(cfg.experts))


@partial(jax.jit, static_argnames=("cfg", "dtype", "modules"))
def publish(
    params: dict[str, Any], *, cfg: ModelConfig, dtype: str | None = None, modules: int = 0
) -> dict[str, Any]:
    """A copy of stacked parameters with layers as a tuple, as decoding wants them, in `dtype`
    where that is said; scores of experts stay as exact as they are. Of the prediction modules
    the first `modules` come along, as a tuple; the engine does not draft with the others.

    The copy shares no buffer with its source, so the source may be donated.
    """
    traces["publish"] += 1

    def copied(path: Any, x: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        kept = dtype is None or name in layout.UNROUNDED
        # Said outright, so as not to rest on what jit does with outputs that are inputs.
        return jnp.copy(x if kept else x.astype(dtype))

    used = {name: tree for name, tree in params.items() if name != "mtp" or modules}
    made = layout.unstack(jax.tree_util.tree_map_with_path(copied, used), cfg)
    if modules:
        stacked = made["mtp"]
        made["mtp"] = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(modules))
    return made
