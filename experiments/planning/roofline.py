"""The time that a chip cannot beat, from what it computes, moves and sends.

Work flows in; seconds flow out. Products, memory and the lending of weights can all go on at
once, so the longest of them counts. What activations wait for cannot be hidden behind anything
of the same micro-batch: those collectives come on top.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from jax.sharding import Mesh

from experiments.planning.counting import Sent, Work, added
from experiments.planning.topology import Topology, ici_rate

LIMITS = {
    "compute": "compute",
    "hbm": "HBM bandwidth",
    "lending": "ICI: weights",
    "waiting": "ICI: activations",
    "dcn": "DCN",
}


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What each part of a chip is busy for."""

    compute: float = 0.0  # matrix units
    hbm: float = 0.0  # memory
    lending: float = 0.0  # links between chips, by weights and their gradients
    waiting: float = 0.0  # ... by what activations wait for
    dcn: float = 0.0  # the data center's network

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def times(self, n: float) -> "Seconds":
        """Of `n` runs."""
        return Seconds(**{f.name: n * getattr(self, f.name) for f in fields(self)})

    @property
    def bound(self) -> float:
        """The longest of what can go on at once, and what cannot on top."""
        return max(self.compute, self.hbm, self.lending, self.dcn) + self.waiting

    @property
    def limit(self) -> str:
        """What most of the bound is due to."""
        return LIMITS[max((f.name for f in fields(self)), key=lambda name: getattr(self, name))]


def seconds(work: Work, moved: float, topology: Topology, mesh: Mesh) -> Seconds:
    """Of a device that does `work` and moves bytes to and from its memory."""
    chip = topology.chip
    lending = waiting = dcn = 0.0
    for sent, size in work.sent.items():
        inside, outside = _travel(sent, size, topology, mesh)
        dcn += outside
        if sent.weights:
            lending += inside
        else:
            waiting += inside
    return Seconds(
        compute=work.passes / (chip.flops / chip.devices),
        hbm=moved / (chip.hbm_rate / chip.devices),
        lending=lending,
        waiting=waiting,
        dcn=dcn,
    )


def _travel(sent: Sent, size: float, topology: Topology, mesh: Mesh) -> tuple[float, float]:
    """Seconds inside a slice and between slices; `size` is what a ring over all ranks sends.

    Between slices goes what ranks of a slice hold together, each sending its part.
    """
    inner = tuple(axis for axis in sent.axes if axis != "slice")
    ranks = {axis: mesh.shape[axis] for axis in sent.axes}
    if "slice" not in ranks:
        return size / ici_rate(topology, mesh, inner), 0.0
    every, slices = math.prod(ranks.values()), ranks["slice"]
    whole = size * every / (every - 1)
    within = math.prod(mesh.shape[axis] for axis in inner)
    outside = whole / within * (slices - 1) / slices / (topology.chip.dcn / topology.chip.devices)
    if within == 1:
        return 0.0, outside
    return whole * (within - 1) / within / ici_rate(topology, mesh, inner), outside


def by_axes(work: Work) -> Mapping[str, float]:
    """Bytes sent by kind and axes, for a reader."""
    said = ({f"{sent.kind} {'+'.join(sent.axes)}": size} for sent, size in work.sent.items())
    return added(*said)
