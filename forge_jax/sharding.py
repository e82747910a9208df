"""Meshes, and the rules from logical to mesh axes.

A layout (a pytree of `Param`) goes in; the `NamedSharding` of every parameter
comes out. A logical axis without a rule is replicated.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from forge_jax.config import UserError
from forge_jax.trees import is_param

# Logical axis -> mesh axis. "fsdp" cuts weights along their input side, "tensor" along heads
# and hidden units; a layer axis is never cut, it is scanned over.
RULES: dict[str, str] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
}


def make_mesh(fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh of Auto axes over the first ``fsdp * tensor`` devices.

    Raises UserError if there are fewer devices.
    """
    need, have = fsdp * tensor, jax.device_count()
    if need > have:
        raise UserError(f"mesh {fsdp=} {tensor=} needs {need} devices, found {have}")
    return jax.make_mesh(
        (fsdp, tensor),
        ("fsdp", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:need],
    )


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
