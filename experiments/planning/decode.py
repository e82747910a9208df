"""A step of decoding: one token for every slot, with pages full up to a context.

A model, a mesh and a plan go in; the engine's program, traced, and its closed form come out. The
compiler cuts the program over the mesh, by how weights and pages lie: heads over "tensor", slots
and their pages over all other axes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from experiments.planning import abstract, estimate
from experiments.planning.config import PlanConfig, slots
from experiments.planning.counting import Sent, Work
from experiments.planning.estimate import Rough
from experiments.planning.programs import Program
from experiments.planning.topology import Topology
from forge_jax.collectives import Axes
from forge_jax.config import MeshConfig, RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.models.experts import ROWS
from forge_jax.rollout import packets
from forge_jax.rollout import programs as engine
from forge_jax.rollout.cache import pool_sharding
from forge_jax.rollout.slots import empty_slots
from forge_jax.sharding import automatic, cuts, replicated
from forge_jax.trees import Param

PAGE = 128  # tokens of a page: large ones suit a TPU, which copies each by itself


def programs(
    model: ModelConfig, mesh: Mesh, sizes: MeshConfig, cfg: PlanConfig, topology: Topology
) -> list[Program]:
    """The engine's program for one token."""
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=automatic(x.sharding)),
        abstract.weights(model, mesh, cfg.dtype),
    )
    params = {**stacked, "layers": (abstract.one_layer(stacked["layers"]),) * model.layers}
    count, where = slots(cfg, topology), stacked["embed"].sharding
    places = sizes.places * sizes.context
    rollout = RolloutConfig(slots=count, context=cfg.context, page=PAGE, chunk=PAGE, places=places)
    own = rollout.sequence_pages
    shape = packets.DecodeShape(rows=count, shared=0, own=own, steps=1, drafts=0, places=places)
    pages = jax.ShapeDtypeStruct(
        ((rollout.place_slots * own + 1) * places, model.kv_heads, PAGE, model.head_dim),
        jnp.dtype(cfg.dtype),
        sharding=pool_sharding(where, model, places),
    )
    packet = packets.pack_decode([], [], shape, rollout)
    states, packed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(where)),
        jax.eval_shape(lambda: (empty_slots(count), jnp.asarray(packet))),
    )
    traced = engine.decode.trace(
        params,
        ((pages, pages),) * model.layers,
        states,
        None,
        packed,
        cfg=model,
        shape=shape,
        attention="pallas",
        mesh=where.mesh if isinstance(where, NamedSharding) else None,
    )
    names = {"arguments": "weights and cache"}
    return [Program(name="decode", traced=traced, runs=1, beside={}, names=names, partitioned=True)]


def model_flops(model: ModelConfig, cfg: PlanConfig, topology: Topology) -> float:
    """Of a step: 2 a weight and slot, 4 a channel and cached position."""
    attention = 4 * model.layers * model.heads * model.head_dim * cfg.context
    return slots(cfg, topology) * (2 * estimate.active(model) + attention)


def rough(
    model: ModelConfig, mesh: Mesh, sizes: MeshConfig, cfg: PlanConfig, topology: Topology
) -> Rough:
    """A step in closed form: weights and pages are read once.

    Weights stay where they are, but for experts cut along their width, which are lent.
    """
    of, share = estimate.sizes(model, mesh, cfg), dealt(model, mesh, sizes, cfg, topology)
    lent = [weight for weight in of.weights if _lent(weight, model)]
    stored = sum(weight.stored for weight in of.weights) * of.bytes
    come = sum(weight.used * weight.layers - weight.stored for weight in lent) * of.bytes
    cache = 2 * share.here * model.layers * of.kv_heads * cfg.context * model.head_dim * of.bytes
    logits = share.rows * model.vocab / sizes.tensor * estimate.WIDE
    whole = max((weight.used for weight in lent), default=0.0) * of.bytes
    memory = {"weights": stored, "cache": cache, "working": whole + 4 * logits}
    sent: dict[Sent, float] = defaultdict(float)
    for kind, axes, size, weights in _collectives(of, share, sizes):
        ranks = of.ranks(*axes)
        if ranks > 1:
            over = tuple(sorted(axis for axis in axes if mesh.shape[axis] > 1))
            times = 2 if kind == "psum" else 1
            sent[Sent(kind, over, weights)] += times * size * (1 - 1 / ranks)
    flops = _products(of, share, sizes)
    table = 0 if model.tied else of.top / of.ranks(*share.width) * of.bytes
    moved = cache + stored + come - table  # of the embedding a row a slot is read
    return Rough(memory, [(1, Work(flops=flops, passes=flops, sent=sent), moved)])


class Share(NamedTuple):
    """The slots that a device has to do with."""

    here: float  # whose pages it reads
    rows: float  # whose streams it has a part of the width of
    routed: float  # whose tokens go over its experts
    width: Axes  # along which the model's width is cut: of weights, so of streams


def dealt(
    model: ModelConfig, mesh: Mesh, sizes: MeshConfig, cfg: PlanConfig, topology: Topology
) -> Share:
    """How the engine deals slots out: see `pool_sharding`, `transformer.block` and `moe`."""
    count, places = slots(cfg, topology), sizes.places * sizes.context
    [width] = cuts(Param((model.embed,), ("embed",), 0.0), mesh)
    together = math.prod(mesh.shape[axis] for axis in width)
    return Share(
        here=count / places,
        rows=count * together / places,
        routed=count * sizes.expert / places,
        width=width,
    )


def _lent(weight: estimate.Weight, model: ModelConfig) -> bool:
    return bool(model.experts and weight.lent and weight.name in estimate.EXPERTS)


def _collectives(
    of: estimate.Sizes, share: Share, sizes: MeshConfig
) -> Iterator[tuple[str, Axes, float, bool]]:
    """Kind, axes, and bytes of the whole of each array, and whether it is of weights: large ones.

    Streams are cut as the width of the weights is. Products of parts are summed over it, and what
    places attended to is gathered.
    """
    m, b = of.model, of.bytes
    part = share.rows * m.embed / of.ranks(*share.width)
    made = (of.heads + 2 * of.kv_heads) * m.head_dim * m.layers * b
    made += 0 if m.experts else 2 * m.ffn / sizes.tensor * m.layers * b
    made += m.vocab / sizes.tensor * estimate.WIDE
    yield "psum", share.width, share.rows * made, False
    attended = share.rows * of.heads * m.head_dim * m.layers * b
    yield "all_gather", share.width, attended, False
    sampled = 2 * math.sqrt(m.vocab) * estimate.WIDE  # a block of the vocabulary: see `sample`
    yield "psum", ("tensor",), share.here * sampled, False
    yield "psum", ("tensor",), part * b * (1 + (1 if m.experts else 2) * m.layers), False
    if not m.experts:
        return
    routed = share.routed * m.embed * m.layers
    entering = "all_gather" if sizes.expert > 1 else "all_to_all"
    yield entering, share.width, routed * b, False
    yield "psum", ("expert", "tensor"), routed * estimate.WIDE, False
    for weight in of.weights:
        if _lent(weight, m):
            yield "all_gather", weight.lent, weight.used * weight.layers * b, True


def _products(of: estimate.Sizes, share: Share, sizes: MeshConfig) -> float:
    """FLOPs: of attention for the heads that are here, of experts for chunks of whole rows."""
    m = of.model
    attention = 4 * share.here * m.layers * of.heads * m.head_dim * of.context
    dense = sum(
        weight.stored
        for weight in of.weights
        if weight.name in ("q", "k", "v", "o")
        or (weight.name in estimate.EXPERTS and not m.experts)
    )
    linear = 2 * share.rows * (dense + of.top / of.ranks(*share.width))
    if not m.experts:
        return attention + linear
    rows = math.ceil(share.routed * m.experts_per_token / ROWS) * ROWS
    return attention + linear + 6 * rows * m.embed * m.ffn / sizes.tensor * m.layers
