"""Meshes, and the rules from logical to mesh axes.

A layout (a pytree of `Param`) goes in; the `NamedSharding` of every parameter
comes out. A logical axis without a rule is replicated.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from forge_jax.config import MeshConfig, UserError
from forge_jax.trees import is_param

# Logical axis -> mesh axis. "fsdp" cuts weights along their input side, "tensor" along heads
# and hidden units; a layer axis is never cut, it is scanned over. No weight is cut along
# "data" and "context", over which `forge_jax.rl.parallel` cuts the work.
RULES: dict[str, str] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
}


def make_mesh(data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh of Auto axes over the first ``data * fsdp * context * tensor`` devices.

    Raises UserError if there are fewer devices.
    """
    axes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    need, have = math.prod(axes.values()), jax.device_count()
    if need > have:
        asked = " ".join(f"{name}={size}" for name, size in axes.items() if size > 1)
        raise UserError(f"mesh {asked} needs {need} devices, found {have}")
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=jax.devices()[:need],
    )


def mesh_from(cfg: MeshConfig) -> jax.sharding.Mesh:
    """`make_mesh` of a configuration."""
    return make_mesh(data=cfg.data, fsdp=cfg.fsdp, context=cfg.context, tensor=cfg.tensor)


def mesh_of(arrays: Any) -> jax.sharding.Mesh | None:
    """The mesh that a pytree of arrays is on; None where that is one device."""
    first = jax.tree.leaves(arrays)[0]
    where = first.sharding if isinstance(first, jax.Array) else None
    mesh = where.mesh if isinstance(where, NamedSharding) else None
    return mesh if isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1 else None


def shardings(layout: Any, mesh: jax.sharding.Mesh) -> Any:
    """A `NamedSharding` for every `Param` of `layout`.

    A dimension that its mesh axis does not divide is replicated, so that small
    models run on any mesh.
    """

    def place(param: Any) -> NamedSharding:
        names = [RULES.get(axis) if axis else None for axis in param.axes]
        spec = [
            name if name and size % mesh.shape[name] == 0 else None
            for name, size in zip(names, param.shape, strict=True)
        ]
        return NamedSharding(mesh, jax.P(*spec))

    return jax.tree.map(place, layout, is_leaf=is_param)


def replicated(beside: Sharding) -> Sharding:
    """Whole on every device of the mesh that `beside` is of, or where it is without one."""
    return NamedSharding(beside.mesh, jax.P()) if isinstance(beside, NamedSharding) else beside
