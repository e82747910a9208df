"""What a program sends that the compiler has cut over devices itself.

A parsed program flows in; the bytes of every collective flow out, by the mesh axes it goes over.
"""

import math
import re
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from experiments.planning.counting import Sent, added
from experiments.planning.hlo import Computation, Instruction, Program, called
from experiments.planning.traffic import trips

# Operations to the names that jax has for them, and what a ring of n sends of the larger array.
KINDS = {
    "all-reduce": ("psum", 2.0),
    "all-gather": ("all_gather", 1.0),
    "reduce-scatter": ("reduce_scatter", 1.0),
    "all-to-all": ("all_to_all", 1.0),
    "collective-permute": ("ppermute", 1.0),
}
BODIES = ("body", "calls", "to_apply", "branch_computations")
LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Named axes of some order of the devices, and those of the group: other axes are at 0.
NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
# A part of a collective that is spread over fusions, and the call that starts one.
CHAINED, START = "chain_id=", '"AsyncCollectiveStart"'
PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


def sent(program: Program, mesh: Mesh) -> dict[Sent, float]:
    """Bytes that a device sends in a run.

    A collective that the compiler spreads over a chain of fusions goes on beside what these
    compute: it counts where it starts, and nothing waits for it.
    """

    def computation(name: str) -> dict[Sent, float]:
        inside = program.computations[name]
        found: list[Mapping[Sent, float]] = []
        for x in inside.instructions.values():
            kind = x.opcode.removesuffix("-start")
            if kind in KINDS:
                if CHAINED not in x.attributes:
                    found.append(_one(x, kind, inside, mesh, False))
                elif any(START in user.attributes for user in inside.users(x.name)):
                    found.append(_one(x, kind, inside, mesh, True))
                continue
            rounds = trips(x, program) if x.opcode == "while" else 1
            for inner in (name for key in BODIES for name in called(x, key)):
                found += [computation(inner)] * rounds
        return added(*found)

    return computation(program.entry)


def _one(
    x: Instruction, kind: str, inside: Computation, mesh: Mesh, beside: bool
) -> dict[Sent, float]:
    group = _group(x)
    places = np.stack(np.unravel_index(group, mesh.devices.shape), axis=1)
    axes = tuple(
        sorted(
            axis
            for axis, column in zip(mesh.axis_names, places.T, strict=True)
            if len(set(column)) > 1
        )
    )
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    if ranks == 1:
        return {}
    name, factor = KINDS[kind]
    operands = sum(b.size for name in x.operands for b in inside.instructions[name].buffers)
    largest = max(
        operands, sum(b.size for b in x.buffers) - operands, max(b.size for b in x.buffers)
    )
    others = 1.0 if kind == "collective-permute" else (ranks - 1) / ranks
    return {Sent(name, axes, beside): factor * largest * others}


def _group(x: Instruction) -> np.ndarray:
    """The places in the mesh of one group of devices."""
    for pattern in (LISTED, PAIR):
        said = pattern.search(x.attributes)
        if said:
            return np.array([int(place) for place in ",".join(said.groups()).split(",")])
    counted, named = COUNTED.search(x.attributes), NAMED.search(x.attributes)
    if counted:
        groups, shape, order = counted.groups()
        return _ordered(shape, order).reshape(_numbers(groups))[0]
    if named:
        axes, shape, order, over = named.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        every = ",".join(map(str, sizes.values()))
        at = tuple(slice(None) if f"'{name}'" in over else 0 for name in sizes)
        return _ordered(shape or every, order).reshape(_numbers(every))[at].reshape(-1)
    raise NotImplementedError(f"groups of {x.name}: {x.attributes[:120]}")


def _ordered(shape: str, order: str | None) -> np.ndarray:
    """Devices counted up in an array of `shape`, its sides then put in `order`."""
    sides = _numbers(shape)
    counted = np.arange(math.prod(sides)).reshape(sides)
    return counted if order is None else counted.transpose(_numbers(order))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
