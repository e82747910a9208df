"""An update on a mesh: micro-batches over its places, the tokens of each over "context".

What `forge_jax.rl.step` takes and gives flows in and out, the same on every mesh. All ranks run
one program of their own parts, and what travels between them is said in it: the ranks of a
place compute one micro-batch, each with queries of its own against the keys of all; those along
"tensor" compute the same tokens with heads, hidden units and words of their own; weights are
lent layer by layer and their gradients summed, see `forge_jax.rl.ranks`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from forge_jax.collectives import Axes
from forge_jax.config import UserError
from forge_jax.rl import anchors, carry, ranks, step
from forge_jax.rl.forward import Batch, StepConfig, occurrences
from forge_jax.rl.losses import Metrics
from forge_jax.rl.prefetch import prefetch
from forge_jax.rl.rows import lay_out, rows
from forge_jax.rl.state import TrainState
from forge_jax.rl.step import Gathered, Judge, Updated
from forge_jax.sched.split import forest_of
from forge_jax.sharding import PLACES, WORK, mesh_of, put
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

ROW = jax.P(PLACES, "context")  # how a row of micro-batches is cut


def update(
    state: TrainState,
    parts: Sequence[MicroBatch],
    cfg: StepConfig,
    base: Any = None,
    judge: Judge | None = None,
) -> tuple[TrainState, Updated]:
    """`step.update`, on the devices that the parameters are on."""
    return step.update(state, parts, cfg, gather, base, judge)


def gather(params: Any, parts: Sequence[MicroBatch], cfg: StepConfig) -> Gathered:
    """`step.gather`, on the devices that `params` are on; a loss of whole samples gets their
    ratios from a forward pass before.

    Raises ValueError if there is no trained occurrence to average over, UserError for a mesh
    that does not suit the model, and for a tree that is carried from block to block where
    tokens are cut over ranks.
    """
    if anchors.wants_sequences(parts, cfg):
        parts = anchors.sequenced(parts, logprobs(params, parts, cfg))
    mesh = mesh_of(params)
    if mesh is None:
        return step.gather(params, parts, cfg)
    trained = sum(forest_of(part).n_occurrences for part in parts)
    packed, carried = _sorted(parts, cfg, mesh)

    def each() -> Iterator[tuple[np.ndarray, Any, Metrics, Array, Array]]:
        for places, batch in _rows(packed, cfg, mesh):
            yield places, *gradients(params, batch, float(trained), cfg, mesh)
        for tree in carried:
            yield from carry.gradients(params, tree, float(trained), cfg, mesh)

    return step.total(each(), trained)


def logprobs(
    params: Any, parts: Sequence[MicroBatch], cfg: StepConfig
) -> Iterator[tuple[np.ndarray, Array]]:
    """`step.logprobs` of all micro-batches, on the devices that `params` are on.

    Raises UserError as `gather` does.
    """
    mesh = mesh_of(params)
    if mesh is None:
        for part in parts:
            yield from step.logprobs(params, part, cfg)
        return
    packed, carried = _sorted(parts, cfg, mesh)
    for places, batch in _rows(packed, cfg, mesh):
        yield places, _logprobs(params, batch, cfg, mesh)
    for tree in carried:
        yield from carry.logprobs(params, tree, cfg, mesh)


def _sorted(
    parts: Sequence[MicroBatch], cfg: StepConfig, mesh: Mesh
) -> tuple[list[PackedTree], list[CarriedTree]]:
    """What ranks share, and what each place computes for itself."""
    carried = [part for part in parts if isinstance(part, CarriedTree)]
    if carried and mesh.shape["context"] > 1:
        raise UserError(
            f"mesh.context={mesh.shape['context']}: a tree of {carried[0].tree.n_tokens} tokens "
            "is beyond pack.budget x mesh.context, and keys are carried from block to block "
            "only where mesh.context=1; raise pack.budget or mesh.context"
        )
    return [part for part in parts if isinstance(part, PackedTree)], carried


def _rows(
    packed: Sequence[PackedTree], cfg: StepConfig, mesh: Mesh
) -> Iterator[tuple[np.ndarray, Batch]]:
    members = rows(packed, math.prod(mesh.shape[axis] for axis in PLACES), cfg)
    for row in prefetch(lambda trees: lay_out(trees, mesh.shape["context"], cfg), members):
        yield row.places, put(row.batch, NamedSharding(mesh, ROW))


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def gradients(
    params: Any, batch: Batch, denominator: Float[Array, ""], cfg: StepConfig, mesh: Mesh
) -> tuple[Any, Metrics, Float[Array, "R M"], Float[Array, "R M"]]:
    """`step.gradients` summed over a row, cut as `params` are; what is per occurrence has a
    line for each rank of a place."""
    work, specs = ranks.over(mesh, *WORK), ranks.specs(cfg.model, mesh, cfg.lora)

    def rank(params: Any, row: Batch, denominator: Array) -> tuple[Any, Metrics, Array, Array]:
        grads, metrics, logp, terms = step.differentiate(params, _own(row), denominator, cfg, mesh)
        largest = jax.lax.pmax(metrics.ratio_max, work) if work else metrics.ratio_max
        sums = jax.tree.map(lambda x: ranks.total(x, work), metrics)
        return (
            ranks.summed(grads, cfg.model, mesh, cfg.lora),
            dataclasses.replace(sums, ratio_max=largest),
            _lines(logp, work),
            _lines(terms, work),
        )

    trained = ranks.trained_specs(cfg.model, mesh, cfg.lora)
    takes, every = (specs, ROW, jax.P()), jax.P()
    computed = ranks.mapped(rank, mesh, takes, (trained, every, every, every))
    return computed(params, batch, denominator)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def _logprobs(params: Any, batch: Batch, cfg: StepConfig, mesh: Mesh) -> Float[Array, "R M"]:
    def rank(params: Any, row: Batch) -> Array:
        return _lines(occurrences(params, _own(row), cfg, mesh).logp, ranks.over(mesh, *WORK))

    takes = (ranks.specs(cfg.model, mesh, cfg.lora), ROW)
    return ranks.mapped(rank, mesh, takes, jax.P())(params, batch)


def _own(row: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0, 0], row)


def _lines(x: Array, over: Axes) -> Array:
    """[M] of every rank, [R, M]."""
    return jax.lax.all_gather(x, over) if over else x[None]
