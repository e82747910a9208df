"""An update on a mesh: micro-batches over "data", the tokens of each over "context".

What `forge_jax.rl.step` takes and gives flows in and out, the same on every mesh. The ranks of
one place of "data" compute one micro-batch, each with queries of its own against the keys of
all; gradients and metrics are summed over both axes. Parameters are whole over these, and cut
over "fsdp" and "tensor" as `forge_jax.sharding` says; over "tensor" the head's vocabulary too.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from forge_jax.attention.tree import resolve
from forge_jax.config import UserError
from forge_jax.rl import carry, step
from forge_jax.rl.forward import Batch, StepConfig, occurrences
from forge_jax.rl.losses import Metrics
from forge_jax.rl.prefetch import prefetch
from forge_jax.rl.rows import lay_out, rows
from forge_jax.rl.state import TrainState
from forge_jax.rl.step import Gathered, Updated
from forge_jax.sched.split import forest_of
from forge_jax.sharding import mesh_of
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

AXES = ("data", "context")


def update(
    state: TrainState, parts: Sequence[MicroBatch], cfg: StepConfig
) -> tuple[TrainState, Updated]:
    """`step.update`, on the devices that the parameters are on."""
    return step.update(state, parts, cfg, gather)


def gather(params: Any, parts: Sequence[MicroBatch], cfg: StepConfig) -> Gathered:
    """`step.gather`, on the devices that `params` are on.

    Raises ValueError if there is no trained occurrence to average over, UserError for a tree
    that is carried from block to block where tokens are cut over ranks or kernels are used.
    """
    mesh = mesh_of(params)
    if mesh is None:
        return step.gather(params, parts, cfg)
    trained = sum(forest_of(part).n_occurrences for part in parts)
    packed, carried = _sorted(parts, cfg, mesh)

    def each() -> Iterator[tuple[np.ndarray, Any, Metrics, Array, Array]]:
        for places, batch in _rows(packed, cfg, mesh):
            yield places, *gradients(params, batch, float(trained), cfg, mesh)
        for tree in carried:
            yield from carry.gradients(params, tree, float(trained), cfg)

    return step.total(each(), trained)


def logprobs(
    params: Any, parts: Sequence[MicroBatch], cfg: StepConfig
) -> Iterator[tuple[np.ndarray, Array]]:
    """`step.logprobs` of all micro-batches, on the devices that `params` are on.

    Raises UserError as `gather` does.
    """
    mesh, alone = mesh_of(params), parts
    if mesh is not None:
        packed, alone = _sorted(parts, cfg, mesh)
        for places, batch in _rows(packed, cfg, mesh):
            yield places, _logprobs(params, batch, cfg, mesh)
    for part in alone:
        yield from step.logprobs(params, part, cfg)


def _sorted(
    parts: Sequence[MicroBatch], cfg: StepConfig, mesh: Mesh
) -> tuple[list[PackedTree], list[CarriedTree]]:
    """What ranks share, and what each place of the data axis computes for itself."""
    carried = [part for part in parts if isinstance(part, CarriedTree)]
    if carried and mesh.shape["context"] > 1:
        raise UserError(
            f"mesh.context={mesh.shape['context']}: a tree of {carried[0].tree.n_tokens} tokens "
            "is beyond pack.budget x mesh.context, and keys are carried from block to block "
            "only where mesh.context=1; raise pack.budget or mesh.context"
        )
    if carried and resolve(cfg.attention, cfg.dtype).startswith("mosaic"):
        raise UserError(
            f"attention={cfg.attention}: a tree of {carried[0].tree.n_tokens} tokens is beyond "
            "pack.budget, and on a mesh keys are carried from block to block by attention=xla"
        )
    return [part for part in parts if isinstance(part, PackedTree)], carried


def _rows(
    packed: Sequence[PackedTree], cfg: StepConfig, mesh: Mesh
) -> Iterator[tuple[np.ndarray, Batch]]:
    where = NamedSharding(mesh, jax.P(*AXES))
    members = rows(packed, mesh.shape["data"], cfg)
    for row in prefetch(lambda trees: lay_out(trees, mesh.shape["context"], cfg), members):
        yield row.places, jax.device_put(row.batch, where)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def gradients(
    params: Any, batch: Batch, denominator: Float[Array, ""], cfg: StepConfig, mesh: Mesh
) -> tuple[Any, Metrics, Float[Array, "R M"], Float[Array, "R M"]]:
    """`step.gradients` summed over a row; what is per occurrence has a line for each rank."""

    def rank(whole: Any, batch: Batch, cut: frozenset[str], over: tuple[str, ...]) -> tuple:
        def total(x: Array) -> Array:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jax.lax.psum(x.astype(wide), over).astype(x.dtype) if over else x

        params, denominator = whole
        grads, metrics, *each = step.gradients(params, batch, denominator, cfg, cut)
        largest = jax.lax.pmax(metrics.ratio_max, over) if over else metrics.ratio_max
        return (
            jax.tree.map(total, grads),
            dataclasses.replace(jax.tree.map(total, metrics), ratio_max=largest),
            *(_lines(x, over) for x in each),
        )

    return _mapped(rank, mesh)((params, denominator), batch)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def _logprobs(params: Any, batch: Batch, cfg: StepConfig, mesh: Mesh) -> Float[Array, "R M"]:
    def rank(params: Any, batch: Batch, cut: frozenset[str], over: tuple[str, ...]) -> Array:
        return _lines(occurrences(params, batch, cfg, cut).logp, over)

    return _mapped(rank, mesh)(params, batch)


def _lines(x: Array, over: tuple[str, ...]) -> Array:
    """[M] of every rank, [R, M]."""
    return jax.lax.all_gather(x, over) if over else x[None]


def _mapped(rank: Callable[..., Any], mesh: Mesh) -> Callable[[Any, Batch], Any]:
    """``rank(whole, batch, cut, over)`` on every rank: of a `whole` that all have and a row,
    and of the names of the axes with more than one device: all, and those that map ranks."""
    cut = frozenset(name for name, size in mesh.shape.items() if size > 1)
    over = tuple(axis for axis in AXES if axis in cut)

    def one(whole: Any, row: Batch) -> Any:
        return rank(whole, jax.tree.map(lambda x: x[0, 0], row), cut, over)

    return jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(jax.P(), jax.P(*AXES)),
        out_specs=jax.P(),
        # The compiler is left what weights are cut over, and no axis of one device: where
        # any is left to it, a kernel has to be mapped over that one too.
        axis_names=frozenset(mesh.axis_names) - (cut - frozenset(AXES)),
        check_vma=False,  # the loops of attention begin with zeros, which vary over no axis
    )
