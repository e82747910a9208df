"""What every rank of a mesh computes with: its part of the weights, and the rest lent.

A model and a mesh go in; how weights are made ready, how gradients are summed and how a
function is mapped over all ranks come out. A rank's own parts are of the dtype that they are
stored in, what is lent to it travels in the one that is computed with and is let go of after
each layer; gradients of a part come back summed over the ranks, in at least float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from forge_jax.collectives import LENDING, Axes, Cut, weights
from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import UNROUNDED, layout
from forge_jax.models.transformer import Ready
from forge_jax.sharding import LENT, WORK, cuts, spec
from forge_jax.trees import Param, is_param


def over(mesh: Mesh | None, *axes: str) -> Axes:
    """Those of `axes` that `mesh` has more than one device along."""
    return tuple(axis for axis in axes if mesh is not None and mesh.shape[axis] > 1)


def ready(model: ModelConfig, dtype: Any, mesh: Mesh | None) -> Ready:
    """How a rank of `mesh`, inside `mapped`, comes by weights of `dtype`; on one device they
    are cast alone.

    Raises UserError where the mesh does not suit the model.
    """
    described = layout(model)
    check(model, mesh)

    def one(name: str, param: Param, weight: Array, stacked: int) -> Array:
        axes, dim = _lent(param, mesh, stacked)
        return weights(weight, axes, dim, weight.dtype if name in UNROUNDED else dtype)

    def all_of(params: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Those of one layer, of `params` that are stacked."""
        return {
            name: one(name, params[name], weight, 1)
            if is_param(params[name])
            else all_of(params[name], weight)
            for name, weight in stored.items()
        }

    expert = over(mesh, "expert") if model.experts else ()
    return Ready(
        cut=Cut(tensor=over(mesh, "tensor"), expert=expert),
        layer=partial(all_of, described["layers"]),
        module=partial(all_of, described.get("mtp", {})),
        top=lambda name, weight: one(name, described[name], weight, 0),
        lent=mesh is not None,
    )


def _lent(param: Param, mesh: Mesh | None, stacked: int) -> tuple[Axes, int]:
    """Over which axes, and along which dimension behind the `stacked` ones, parts are lent."""
    if mesh is not None:
        for dim, (logical, axes) in enumerate(zip(param.axes, cuts(param, mesh), strict=True)):
            if logical in LENT and axes:
                return axes, dim - stacked
    return (), 0


def check(model: ModelConfig, mesh: Mesh | None) -> None:
    """Raises UserError naming the axis of `mesh` that does not divide a size of `model`."""
    if mesh is None:
        return
    sizes = [("tensor", name) for name in ("heads", "kv_heads", "ffn")]
    for axis, name in [*sizes, ("expert", "experts")]:
        size, ranks = getattr(model, name), mesh.shape[axis]
        if size % ranks:
            raise UserError(f"mesh.{axis}={ranks} does not divide the model's {name}={size}")


def specs(model: ModelConfig, mesh: Mesh) -> Any:
    """How parameters and their gradients are cut."""
    return jax.tree.map(lambda p: spec(p, mesh), layout(model), is_leaf=is_param)


def summed(grads: Any, model: ModelConfig, mesh: Mesh) -> Any:
    """Gradients summed over the ranks with other tokens that hold the same part of a weight;
    those that were lent it are in the sum already."""

    def one(param: Param, g: Array) -> Array:
        held = {axis for axes in cuts(param, mesh) for axis in axes}
        return total(g, tuple(axis for axis in over(mesh, *WORK) if axis not in held))

    with jax.named_scope(LENDING):
        return jax.tree.map(one, layout(model), grads, is_leaf=is_param)


def total(x: Array, axes: Axes) -> Array:
    """The sum over `axes`, in at least float32 and in the dtype of `x`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.psum(x.astype(wide), axes).astype(x.dtype) if axes else x


def mapped(
    rank: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`rank` on every rank of `mesh`, of the parts of its arguments that `in_specs` say; on one
    device `rank` itself."""
    if mesh is None:
        return rank
    # Unchecked: the loops of attention begin with zeros, which vary over no axis, and the
    # collectives of this code say their backward passes themselves.
    return partial(jax.shard_map, mesh=mesh, check_vma=False)(
        rank, in_specs=in_specs, out_specs=out_specs
    )
