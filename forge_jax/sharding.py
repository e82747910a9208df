"""Meshes, and the rules from logical to mesh axes.

A layout (a pytree of `Param`) goes in; the `NamedSharding` of every parameter comes out. A
logical axis without a rule is whole on every device.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from forge_jax.config import HostsConfig, MeshConfig, UserError
from forge_jax.trees import Param, is_param

# The axes of every mesh, the slowest network first: "slice" may go over the data center's.
AXES = ("slice", "data", "fsdp", "expert", "context", "tensor")
# Over these the micro-batches of a step are dealt out, over "context" the tokens of each.
PLACES = ("slice", "data", "fsdp", "expert")
WORK = (*PLACES, "context")
# Rows of the rollout engine are dealt out over all of these; over those but the last one a rank's
# tokens still lie together, as experts want them.
ROWS = ("slice", "data", "fsdp", "context", "expert")

# Logical axis -> mesh axes. All ranks with tokens of their own, but for those of "data" and
# "slice", share the weights: each keeps a part and is lent the others layer by layer (ZeRO-3,
# arXiv 1910.02054). "tensor" cuts what is computed of a token, "expert" the experts as well.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
    "embed": ("fsdp", "expert", "context"),
    "expert_embed": ("fsdp", "context"),
}
LENT = ("embed", "expert_embed")  # the logical axes that are whole where weights are used


def join(cfg: HostsConfig) -> None:
    """Makes this process one of those that share a mesh; to be called before devices are used.

    Processes on CPUs exchange arrays by gloo.
    """
    if cfg.coordinator is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    told = None if cfg.coordinator == "auto" else cfg.coordinator
    jax.distributed.initialize(told, cfg.processes, cfg.process)


def make_mesh(
    *,
    slice: int = 1,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of Explicit axes over the first of `devices`, by default all there are.

    Where devices know the slice they are of, a place of the axis "slice" is one slice, so that
    every other axis stays inside one. Raises UserError if there are fewer devices or slices.
    """
    sizes = dict(zip(AXES, (slice, data, fsdp, expert, context, tensor), strict=True))
    there = jax.devices() if devices is None else list(devices)
    need = math.prod(sizes.values())
    asked = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if need > len(there):
        raise UserError(f"mesh {asked} needs {need} devices, found {len(there)}")
    explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
    shape = tuple(sizes.values())
    slices = {getattr(device, "slice_index", 0) for device in there}
    if slice == 1 or len(slices) == 1:
        # Sides of a torus are what they are: an axis may lie along a part of one.
        arranged = mesh_utils.create_device_mesh(
            shape, there[:need], allow_split_physical_axes=True
        )
        return Mesh(arranged, AXES, explicit)
    if len(slices) != slice or need != len(there):
        raise UserError(
            f"mesh {asked} needs {slice} slices of {need // slice} devices, "
            f"found {len(slices)} of {len(there) // len(slices)}"
        )
    inside, across = (1, *shape[1:]), (slice, *(1,) * (len(shape) - 1))
    arranged = mesh_utils.create_hybrid_device_mesh(
        inside, across, there, allow_split_physical_axes=True
    )
    return Mesh(arranged, AXES, explicit)


def mesh_from(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """`make_mesh` of a configuration."""
    return make_mesh(
        slice=cfg.slice,
        data=cfg.data,
        fsdp=cfg.fsdp,
        expert=cfg.expert,
        context=cfg.context,
        tensor=cfg.tensor,
        devices=devices,
    )


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh that a pytree of arrays is on; None where that is one device."""
    first = jax.tree.leaves(arrays)[0]
    where = first.sharding if isinstance(first, jax.Array) else None
    mesh = where.mesh if isinstance(where, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def rows_over(mesh: Mesh | None) -> tuple[str, ...]:
    """The axes of `mesh`, of more than one device, over which rows of the engine are dealt out."""
    return () if mesh is None else tuple(axis for axis in ROWS if mesh.shape[axis] > 1)


def cuts(param: Param, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The axes of `mesh`, of more than one device, over which each dimension is cut.

    They are as many of those that its rule names as divide it together, from the first on, so
    that small models run on any mesh.
    """
    found = []
    for size, logical in zip(param.shape, param.axes, strict=True):
        axes = [axis for axis in RULES.get(logical or "", ()) if mesh.shape[axis] > 1]
        while axes and size % math.prod(mesh.shape[axis] for axis in axes):
            axes.pop()
        found.append(tuple(axes))
    return tuple(found)


def spec(param: Param, mesh: Mesh) -> jax.P:
    """How `param` is cut over `mesh`."""
    return jax.P(*(axes or None for axes in cuts(param, mesh)))


def shardings(layout: Any, mesh: Mesh) -> Any:
    """A sharding for every `Param` of `layout`; a mesh of one device is that device."""
    if mesh.size == 1:
        alone = SingleDeviceSharding(mesh.devices.item())
        return jax.tree.map(lambda _: alone, layout, is_leaf=is_param)
    return jax.tree.map(lambda p: NamedSharding(mesh, spec(p, mesh)), layout, is_leaf=is_param)


def replicated(beside: Sharding) -> Sharding:
    """Whole on every device of the mesh that `beside` is of, or where it is without one."""
    return NamedSharding(beside.mesh, jax.P()) if isinstance(beside, NamedSharding) else beside


def automatic(where: Sharding) -> Sharding:
    """The same placement, on a mesh over whose axes the compiler cuts what is computed."""
    if not isinstance(where, NamedSharding) or not isinstance(where.mesh, Mesh):
        return where
    axes = (jax.sharding.AxisType.Auto,) * where.mesh.devices.ndim
    return NamedSharding(Mesh(where.mesh.devices, where.mesh.axis_names, axes), where.spec)


def put(tree: Any, where: Any) -> Any:
    """`tree` placed by the shardings `where`, one for each array or for all of them.

    Over several processes every one has to hold all of `tree`, and keeps what its devices are
    to have.
    """
    if isinstance(where, Sharding):
        where = jax.tree.map(lambda _, one=where: one, tree)
    return jax.tree.map(_put, tree, where)


def _put(x: Any, where: Sharding) -> jax.Array:
    if where.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, where)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, where, lambda at: host[at])
