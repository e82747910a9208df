"""A step of decoding: one token for every slot, with caches full up to a context.

A model, a mesh and a plan go in; the engine's program, traced, and its closed form come out. The
compiler cuts the program over the mesh, by how weights and caches lie: slots over the places of
the mesh, heads over "tensor".
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from experiments.planning import abstract, estimate
from experiments.planning.config import PlanConfig, slots
from experiments.planning.counting import Sent, Work
from experiments.planning.estimate import Rough
from experiments.planning.programs import Program
from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import programs as engine
from forge_jax.rollout.cache import cache_sharding
from forge_jax.sharding import automatic, replicated


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
    shape = (count, model.kv_heads, cfg.context, model.head_dim)
    keys = jax.ShapeDtypeStruct(
        shape, jnp.dtype(cfg.dtype), sharding=cache_sharding(where, model, count)
    )
    states: Any = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(where)),
        jax.eval_shape(lambda: engine.empty_slots(count)),
    )
    traced = engine.decode.trace(
        params,
        ((keys, keys),) * model.layers,
        states,
        cfg=model,
        steps=1,
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
    """A step in closed form: weights and caches are read once."""
    of = estimate.sizes(model, mesh, cfg)
    count = slots(cfg, topology)
    here = count / sizes.places if count % sizes.places == 0 else count
    stored = sum(weight.stored for weight in of.weights) * of.bytes
    used = sum(weight.used * max(1, weight.layers) for weight in of.weights) * of.bytes
    cache = 2 * here * model.layers * of.kv_heads * cfg.context * model.head_dim * of.bytes
    table = of.top * of.bytes  # of the embedding a row a slot is read
    sent: dict[Sent, float] = {}
    if sizes.tensor > 1:
        size = here * model.embed * of.bytes * 2 * (1 - 1 / sizes.tensor)
        sent[Sent("psum", ("tensor",), False)] = (2 * model.layers + 1) * size
    if used > stored:
        lent = tuple(sorted({axis for weight in of.weights for axis in weight.lent}))
        sent[Sent("all_gather", lent, True)] = used - stored
    flops = model_flops(model, cfg, topology) * here / count / sizes.tensor
    layer = max(weight.used for weight in of.weights) * of.bytes if used > stored else 0.0
    memory = {
        "weights": stored,
        "cache": cache,
        "working": layer + 4 * here * model.vocab / sizes.tensor * estimate.WIDE,
    }
    moved = cache + used - (0 if model.tied else table)
    return Rough(memory, [(1, Work(flops=flops, passes=flops, sent=sent), moved)])
