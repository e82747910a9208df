"""Our parameters as tensors in files: one for each layer and expert, in the layout of other
libraries.

A part of a parameter, given by a slice of each of its axes, is read from the parts of the
tensors that hold it and from nothing else; so each device's shard is read by itself, and a
whole model is never in host memory beside its arrays.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import TOP, Family, Stored
from forge_jax.models.hf_files import Described
from forge_jax.models.layout import layout

Window = tuple[slice, ...]


class Source(Protocol):
    """Where tensors are read from."""

    def describe(self, name: str) -> Described:
        """Shape and dtype."""
        ...

    def read(self, name: str, window: Window) -> np.ndarray:
        """A part of a tensor."""
        ...


class Leaf(NamedTuple):
    """One of our parameters and the tensors that hold it."""

    ours: str
    stored: Stored
    shape: tuple[int, ...]  # ours, layers and experts included
    lead: int  # leading axes along which every index has a tensor: layers, experts

    def name(self, place: Sequence[int]) -> str:
        """The tensor at an index of the leading axes."""
        if self.lead == 0:
            return self.stored.name
        expert = place[1] if self.lead == 2 else None
        return f"model.layers.{place[0]}.{self.stored.name.format(expert=expert)}"

    def places(self) -> list[tuple[int, ...]]:
        """Every index of the leading axes."""
        return list(itertools.product(*map(range, self.shape[: self.lead])))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The axes (of ours, without leading ones) that each axis of a tensor is made of."""
        axes = tuple(range(len(self.shape) - self.lead))
        if self.stored.inputs:
            return axes[self.stored.inputs :], axes[: self.stored.inputs]
        return (axes,) if self.stored.flat else tuple((axis,) for axis in axes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one tensor."""
        inner = self.shape[self.lead :]
        return tuple(math.prod(inner[axis] for axis in group) for group in self.groups)

    def outward(self, value: np.ndarray) -> np.ndarray:
        """One tensor's values, from our layout to theirs."""
        return value.transpose(sum(self.groups, ())).reshape(self.stored_shape)

    def inward(self, value: np.ndarray) -> np.ndarray:
        """The inverse of `outward`."""
        inner, order = self.shape[self.lead :], sum(self.groups, ())
        return value.reshape([inner[axis] for axis in order]).transpose(np.argsort(order))

    def read(self, source: Source, place: Sequence[int], index: Window) -> np.ndarray:
        """The part `index` (of ours, without leading axes) of one tensor, in our layout.

        Of axes that are stored as one, the first is cut in the file and the others here.
        """
        inner = self.shape[self.lead :]
        window, sizes = [], []
        for first, *rest in self.groups:
            size = math.prod(inner[axis] for axis in rest)
            window.append(slice(index[first].start * size, index[first].stop * size))
            sizes += [index[first].stop - index[first].start, *(inner[axis] for axis in rest)]
        found = source.read(self.name(place), tuple(window)).reshape(sizes)
        found = found.transpose(np.argsort(sum(self.groups, ())))
        first_axes = {group[0] for group in self.groups}
        return found[tuple(slice(None) if a in first_axes else s for a, s in enumerate(index))]


def leaves(cfg: ModelConfig, family: Family) -> list[Leaf]:
    """Every parameter of the model, in the order of `layout`.

    Raises UserError on one for which the family has no tensor.
    """
    described = layout(cfg)
    found = [Leaf(ours, TOP[ours], described[ours].shape, 0) for ours in TOP if ours in described]
    for ours, param in described["layers"].items():
        if ours not in family.layer:
            raise UserError(f"family={cfg.family!r} has no tensor for the parameter {ours!r}")
        stored = family.layer[ours]
        found.append(Leaf(ours, stored, param.shape, 2 if "{expert}" in stored.name else 1))
    return found


def dtype_of(ours: str, stored: Any, dtype: Any, family: Family) -> np.dtype:
    """The dtype of a parameter: that asked for, but at least fp32 for what the family keeps wide;
    where none is asked for, that in which it is stored."""
    if dtype is None:
        return np.dtype(stored)
    return np.dtype(jnp.promote_types(dtype, jnp.float32) if ours in family.wide else dtype)


def nested(found: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """A value for every leaf, in the places of the parameters."""
    tree: dict[str, Any] = {"layers": {}}
    for leaf, value in zip(found, values, strict=True):
        (tree["layers"] if leaf.lead else tree)[leaf.ours] = value
    return tree


def check_shapes(source: Source, found: Sequence[Leaf], where: Callable[[str], object]) -> None:
    """Raises UserError naming the tensor of another shape than the config says."""
    for leaf in found:
        for name in map(leaf.name, leaf.places()):
            tensor = source.describe(name)
            if tensor.shape != leaf.stored_shape:
                raise UserError(
                    f"{where(name)}: tensor {tensor.name} has shape {tensor.shape}, "
                    f"the config says {leaf.stored_shape}"
                )


def assembled(
    found: Sequence[Leaf], source: Source, dtypes: Sequence[Any], shardings: Any
) -> list[jax.Array]:
    """Every parameter in its dtype, where `shardings`, a tree of the parameters', puts it; where
    that is None on the default device."""
    where = shardings or nested(found, [None] * len(found))
    places = [(where["layers"] if leaf.lead else where)[leaf.ours] for leaf in found]
    each = zip(found, dtypes, places, strict=True)
    return [_assemble(leaf, source, dtype, place) for leaf, dtype, place in each]


def _assemble(leaf: Leaf, source: Source, dtype: Any, sharding: Sharding | None) -> jax.Array:
    """One parameter in `dtype`, on the devices of `sharding`; without one, on the default device.

    Each distinct shard is read once and leaves host memory before the next is read.
    """
    if sharding is None:
        return jnp.asarray(_part(leaf, source, dtype, _whole(leaf.shape)))
    shards: dict[tuple[tuple[int, int], ...], tuple[Window, list[jax.Device]]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        ends = [s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True)]
        shards.setdefault(tuple(ends), (tuple(slice(*e) for e in ends), []))[1].append(device)
    pieces = []
    for index, devices in shards.values():
        value = _part(leaf, source, dtype, index)
        placed = [jax.device_put(value, device) for device in devices]
        pieces += jax.block_until_ready(placed)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)


def _part(leaf: Leaf, source: Source, dtype: Any, index: Window) -> np.ndarray:
    """A part of a parameter, filled a tensor at a time."""
    lead, inner = index[: leaf.lead], index[leaf.lead :]
    part = np.empty([s.stop - s.start for s in index], dtype)
    for place in itertools.product(*(range(s.start, s.stop) for s in lead)):
        at = tuple(i - s.start for i, s in zip(place, lead, strict=True))
        part[at] = leaf.read(source, place, inner)
    return part


def _whole(shape: Sequence[int]) -> Window:
    return tuple(slice(0, size) for size in shape)
