"""Arrays that are not there: shapes, dtypes and places of what programs take.

A model, a mesh of devices to compile for and a context go in; pytrees of `ShapeDtypeStruct`
come out. The batch is the worst there is at a context: one causal path, every token trained.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from forge_jax.attention.tiles import Tiles
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import UNROUNDED, layout
from forge_jax.rl.forward import Batch, StepConfig
from forge_jax.rl.parallel import ROW
from forge_jax.rl.rows import lay_out
from forge_jax.rl.state import TrainState, optimizer
from forge_jax.sharding import shardings
from forge_jax.trees import is_param
from forge_jax.types import PackedTree, route_dtype

Abstract = jax.ShapeDtypeStruct
TILES = (512, 1024, 2048)
LISTED = 250_000  # pairs of tiles that a core's scalar memory holds


def weights(model: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    """Parameters of a model, cut over a mesh; scores of experts are float32 in any case."""
    described = layout(model)

    def one(path: Any, param: Any, where: Any) -> Abstract:
        exact = jax.tree_util.keystr(path[-1:], simple=True) in UNROUNDED
        kind = jnp.dtype(jnp.float32 if exact else dtype)
        return Abstract(param.shape, kind, sharding=where)

    where = shardings(described, mesh)
    return jax.tree_util.tree_map_with_path(one, described, where, is_leaf=is_param)


def one_layer(stacked: Any) -> Any:
    """The first of stacked parameters, cut as they are."""

    def one(x: Abstract) -> Abstract:
        where = x.sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, jax.P(*where.spec[1:]))
        return Abstract(x.shape[1:], x.dtype, sharding=where)

    return jax.tree.map(one, stacked)


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """Arrays of the shapes and dtypes in `tree`, whole on every device."""
    where = NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda x: Abstract(x.shape, x.dtype, sharding=where), tree)


def state(params: Any, mesh: Mesh, cfg: StepConfig) -> TrainState:
    """As `forge_jax.rl.state.create` makes it."""
    made = optimizer(cfg.optim)
    opt_state = optax.tree.map_params(
        made,
        lambda x, like: Abstract(x.shape, x.dtype, sharding=like.sharding),
        jax.eval_shape(made.init, params),
        params,
        transform_non_params=lambda x: everywhere(x, mesh),
    )
    step = everywhere(Abstract((), jnp.int32), mesh)
    return TrainState(step=step, params=params, opt_state=opt_state)


def batch(context: int, mesh: Mesh, places: int, cfg: StepConfig) -> tuple[Batch, float]:
    """A row of micro-batches of one path of `context` tokens each, laid out as a run would;
    and the share of the listed pairs of tiles that are visited."""
    laid = lay_out([path(context, cfg.model)], mesh.shape["context"], cfg).batch
    lists = laid.plan.lists
    assert isinstance(lists, Tiles)
    live = max(
        int(lists.n_rows.max()) / lists.rows.shape[-1],
        int(lists.n_columns.max()) / lists.columns.shape[-1],
    )
    where = NamedSharding(mesh, ROW)

    def wide(x: np.ndarray) -> Abstract:
        return Abstract((places, *x.shape[1:]), x.dtype, sharding=where)

    return jax.tree.map(wide, laid), live


def listed(batch: Batch) -> int:
    """Pairs of tiles that a kernel is given at once."""
    lists = batch.plan.lists
    assert isinstance(lists, Tiles)
    return max(lists.rows.shape[-1], lists.columns.shape[-1])


def path(tokens: int, model: ModelConfig) -> PackedTree:
    """One path, all of whose tokens but the first are trained, as they were routed."""
    routes = np.zeros((tokens, model.layers, model.experts_per_token), route_dtype(model.experts))
    place = np.arange(tokens, dtype=np.int32)
    edges = tokens - 1
    ones = np.ones(edges, np.float32)
    return PackedTree(
        tokens=np.zeros(tokens, np.int32),
        depth=place,
        parent=np.maximum(place - 1, 0),
        exit=np.full(tokens, tokens, np.int32),
        edge_token=place[1:],
        edge_support=None,
        edge_temperature=ones,
        occurrence_edge=place[:-1],
        occurrence_sample=np.zeros(edges, np.int32),
        old_logp=ones,
        advantage=ones,
        weight=ones,
        occurrence_index=place[1:].astype(np.int64),
        multiplicity=np.ones(tokens, np.float32),
        routes=routes if model.experts else None,
        n_tokens=tokens,
        n_edges=edges,
        n_occurrences=edges,
    )


def device_bytes(tree: Any) -> int:
    """What the arrays of `tree` take on one device."""

    def one(x: Any) -> int:
        return int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))
