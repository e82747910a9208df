"""The chips of a TPU slice, and how fast a collective runs over axes of a mesh of them.

A name such as v5p:8x8x8 goes in; devices to compile for come out, without any TPU, and the
rate at which a chip sends over the links that mesh axes lie along.
"""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.planning.chips import Chip, chip
from forge_jax.config import UserError

# Nothing is asked of a cloud, and other processes may compile at the same time.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
UNKNOWN = "INVALID_ARGUMENT"  # how the compiler begins what it says of a slice there is not
HOST = 4  # chips of the smallest host; a smaller slice is a part of one


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Slices of chips in a torus, joined by the data center's network."""

    name: str  # as the compiler has it
    chip: Chip
    shape: tuple[int, ...]  # chips along each side
    slices: int

    @property
    def chips(self) -> int:
        """Of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """That jax sees, of all slices."""
        return self.chips * self.chip.devices


def parse(said: str, slices: int = 1) -> Topology:
    """The topology of a name: GENERATION:AxBxC, or GENERATION-COUNT where that is one shape.

    A count is of TensorCores for v4 and v5p and of chips for v5e and v6e, as in the names of
    Google's accelerator types. Raises UserError.
    """
    sides = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", said)
    count = re.fullmatch(r"(\w+)-(\d+)", said)
    if sides:
        kind, shape = chip(sides[1], said), tuple(map(int, sides[2].split("x")))
    elif count:
        kind = chip(count[1], said)
        shape = _shape(kind, int(count[2]), said)
    else:
        raise UserError(f"topology={said!r} must be like v5p:8x8x8 or v5p-1024")
    if len(shape) != kind.sides or min(shape) < 1:
        raise UserError(f"topology={said!r}: {kind.name} has {kind.sides} sides of at least 1 chip")
    name = f"{kind.name}:{'x'.join(map(str, shape))}"
    return Topology(name=name, chip=kind, shape=shape, slices=slices)


def _shape(kind: Chip, count: int, said: str) -> tuple[int, ...]:
    """The most even shape of a power of two of chips, the longest side last."""
    chips, rest = divmod(count, kind.counted) if kind.counted else (0, 0)
    if rest or chips < 1 or chips & (chips - 1):
        example = "x".join(["4"] * kind.sides)
        raise UserError(
            f"topology={said!r} is no one shape; name its sides, as {kind.name}:{example}"
        )
    if kind.sides == 3 and chips <= HOST:
        return {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)}[chips]
    doublings = chips.bit_length() - 1
    return tuple(2 ** ((doublings + side) // kind.sides) for side in range(kind.sides))


def devices(topology: Topology) -> list[Any]:
    """Devices that programs can be compiled for, none of which is there.

    Raises UserError for what the compiler does not know, and where there is no compiler.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if math.prod(topology.shape) < HOST:
        options["chips_per_host_bounds"] = (*topology.shape, 1, 1)[:3]
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise UserError("no TPU compiler here: pip install libtpu")
    try:
        made = topologies.get_topology_desc(topology.name, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(UNKNOWN):
            raise
        raise UserError(f"topology={topology.name!r}: {error}") from error
    return list(made)


def links(topology: Topology, mesh: Mesh, axes: Iterable[str]) -> float:
    """Links of a chip, each counted in one direction, that a collective over `axes` can keep
    busy: two of each side of the torus that is gone around, one of each that is not.

    Infinite where `axes` never leave a chip.
    """
    at = tuple(slice(None) if name in set(axes) else 0 for name in mesh.axis_names)
    coords = np.array([device.coords for device in np.ravel(mesh.devices[at])])
    steps = [len(set(column)) for column in coords.T[: len(topology.shape)]]
    found = 0
    for step, side in zip(steps, topology.shape, strict=True):
        if step > 1:
            found += 2 if step == side and side % topology.chip.wraps == 0 else 1
    return found or math.inf


def ici_rate(topology: Topology, mesh: Mesh, axes: Iterable[str]) -> float:
    """Bytes a second that a device sends in a collective over `axes` of one slice."""
    chip = topology.chip
    one_link = chip.ici / 2 / (2 * chip.sides)
    return one_link * links(topology, mesh, axes) / chip.devices
