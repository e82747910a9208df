"""What every rank of a mesh computes with: its part of the weights, and the rest lent.

A model and a mesh go in; how weights are made ready, how gradients are summed and how a
function is mapped over all ranks come out. A rank's own parts are of the dtype that they are
stored in, what is lent to it travels in the one that is computed with and is let go of after
each layer; gradients of a part come back summed over the ranks, in at least float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from forge_jax.collectives import LENDING, Axes, Cut, enter, weights
from forge_jax.config import LoraConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import Adapted
from forge_jax.models.layout import UNROUNDED, layout
from forge_jax.models.lora import adapters_layout, described, trained_of
from forge_jax.models.transformer import Ready
from forge_jax.sharding import LENT, WORK, cuts, spec
from forge_jax.trees import Param, is_param

NO_ADAPTERS = LoraConfig()


def over(mesh: Mesh | None, *axes: str) -> Axes:
    """Those of `axes` that `mesh` has more than one device along."""
    return tuple(axis for axis in axes if mesh is not None and mesh.shape[axis] > 1)


def ready(
    model: ModelConfig, dtype: Any, mesh: Mesh | None, lora: LoraConfig = NO_ADAPTERS
) -> Ready:
    """How a rank of `mesh`, inside `mapped`, comes by weights of `dtype`, adapters beside them; on
    one device they are cast alone.

    Raises UserError where the mesh does not suit the model.
    """
    whole = layout(model)
    pairs = adapters_layout(model, lora)["layers"] if lora.rank else {}
    if mesh is not None:
        check(model, mesh.shape)

    def one(name: str, param: Param, weight: Array, stacked: int = 1) -> Array:
        kept = weight.dtype if name in UNROUNDED else dtype
        return _borrowed(param, weight, stacked, kept, mesh)

    def all_of(params: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Those of one layer, of `params` that are stacked."""
        made: dict[str, Any] = {}
        for name, weight in stored.items():
            if isinstance(weight, Adapted):
                own = one(name, params[name], weight.weight)
                made[name] = _beside(pairs[name], replace(weight, weight=own), dtype, mesh)
            elif is_param(params[name]):
                made[name] = one(name, params[name], weight)
            else:
                made[name] = all_of(params[name], weight)
        return made

    expert = over(mesh, "expert") if model.experts else ()
    return Ready(
        cut=Cut(tensor=over(mesh, "tensor"), expert=expert),
        layer=partial(all_of, whole["layers"]),
        module=partial(all_of, whole.get("mtp", {})),
        top=lambda name, weight: one(name, whole[name], weight, 0),
        lent=mesh is not None,
    )


def _borrowed(param: Param, weight: Array, stacked: int, dtype: Any, mesh: Mesh | None) -> Array:
    """A weight of `dtype` from this rank's part of it, which has `stacked` dimensions less."""
    axes, dim = _lent(param, mesh, stacked)
    return weights(weight, axes, dim, dtype)


def _beside(pair: Mapping[str, Param], stored: Adapted, dtype: Any, mesh: Mesh | None) -> Adapted:
    """A weight that is ready, and its adapters of `dtype` made so."""

    def side(param: Param, held: Array) -> Array:
        x = _borrowed(param, held, 1, dtype, mesh)
        if mesh is None or ("tensor",) in cuts(param, mesh):
            return x
        return enter(x, over(mesh, "tensor"))  # each rank goes on with its part of the other side

    return replace(stored, a=side(pair["a"], stored.a), b=side(pair["b"], stored.b))


def _lent(param: Param, mesh: Mesh | None, stacked: int) -> tuple[Axes, int]:
    """Over which axes, and along which dimension behind the `stacked` ones, parts are lent."""
    if mesh is not None:
        for dim, (logical, axes) in enumerate(zip(param.axes, cuts(param, mesh), strict=True)):
            if logical in LENT and axes:
                return axes, dim - stacked
    return (), 0


def check(model: ModelConfig, ranks: Mapping[str, int]) -> None:
    """Raises UserError where ranks along the axes of a mesh, so many each, do not suit `model`."""
    refused = refusal(model, ranks)
    if refused:
        raise UserError(refused)


def refusal(model: ModelConfig, ranks: Mapping[str, int]) -> str | None:
    """Which axis does not divide which size of `model`; None where all do.

    Where there are no experts "expert" cuts what "fsdp" does.
    """
    sizes = [("tensor", name) for name in ("heads", "kv_heads", "ffn")]
    for axis, name in [*sizes, ("expert", "experts")]:
        size = getattr(model, name)
        if size % ranks[axis]:
            return f"mesh.{axis}={ranks[axis]} does not divide the model's {name}={size}"
    return None


def specs(model: ModelConfig, mesh: Mesh, lora: LoraConfig = NO_ADAPTERS) -> Any:
    """How parameters are cut, adapters beside them."""
    return _cut(described(model, lora), mesh)


def trained_specs(model: ModelConfig, mesh: Mesh, lora: LoraConfig = NO_ADAPTERS) -> Any:
    """How what is trained, and its gradients, are cut."""
    return _cut(trained_of(described(model, lora)), mesh)


def _cut(params: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda p: spec(p, mesh), params, is_leaf=is_param)


def summed(grads: Any, model: ModelConfig, mesh: Mesh, lora: LoraConfig = NO_ADAPTERS) -> Any:
    """Gradients summed over the ranks with other tokens that hold the same part of a weight;
    those that were lent it are in the sum already."""

    def one(param: Param, g: Array) -> Array:
        held = {axis for axes in cuts(param, mesh) for axis in axes}
        return total(g, tuple(axis for axis in over(mesh, *WORK) if axis not in held))

    with jax.named_scope(LENDING):
        return jax.tree.map(one, trained_of(described(model, lora)), grads, is_leaf=is_param)


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
