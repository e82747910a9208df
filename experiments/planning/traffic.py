"""Bytes that a compiled program moves to and from the memory of its device.

A parsed program flows in, bytes flow out. As in XLA's own analysis a fusion reads its operands
and writes its results once, a slice moves what is sliced; unlike there a loop's body counts as
often as it runs, and what lives in a memory of the core moves nothing.
"""

import re

from experiments.planning.counting import ATTENTION
from experiments.planning.hlo import Computation, Instruction, Program, called

# What names buffers, or waits for them.
NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "add-dependency", "opt-barrier", "partition-id", "replica-id", "iota",
}  # fmt: skip
SLICES = ("dynamic-slice", "gather", "slice")  # read what they result in
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # write this operand in place
VIEWS = ("bitcast", "reshape", "get-tuple-element")
ESTIMATE = re.compile(r'"bytes_accessed":"(\d+)"')


def moved(program: Program, live: float = 1.0, taken: float = 1.0) -> float:
    """Bytes of a run; `live` and `taken` as in `experiments.planning.counting.Known`.

    Raises NotImplementedError for a loop whose number of rounds its condition does not tell.
    """
    seen: dict[str, float] = {}

    def computation(name: str) -> float:
        if name not in seen:
            inside = program.computations[name]
            seen[name] = sum(instruction(x, inside) for x in inside.instructions.values())
        return seen[name]

    def instruction(x: Instruction, inside: Computation) -> float:
        if x.opcode == "while":
            return trips(x, program) * sum(map(computation, called(x, "body")))
        if x.opcode == "conditional":
            branches = called(x, "branch_computations")
            branches += called(x, "true_computation") + called(x, "false_computation")
            costs = sorted(map(computation, branches))
            return taken * costs[-1] + (1 - taken) * costs[0]
        if x.opcode in ("call", "async-start"):
            return sum(map(computation, called(x, "to_apply") + called(x, "calls")))
        if x.opcode == "custom-call":
            estimate = ESTIMATE.search(x.attributes)
            if estimate:  # of all that it reads and writes, wherever that lives
                said = max(0, int(estimate[1]) - _core(x, inside))
                return said * (live if ATTENTION in x.name else 1)
            return 0.0 if "AllocateBuffer" in x.attributes else _all(x, inside)
        return _fusion(x, inside, program) if x.opcode == "fusion" else _other(x, inside)

    return computation(program.entry)


def trips(loop: Instruction, program: Program) -> int:
    """Rounds of a loop that counts up from 0 to a constant."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    (condition,) = called(loop, "condition")
    inside = program.computations[condition]
    root = inside.root
    operands = [inside.instructions[name] for name in root.operands]
    bounds = [x.attributes.partition(")")[0] for x in operands if x.opcode == "constant"]
    if root.opcode != "compare" or "direction=LT" not in root.attributes or len(bounds) != 1:
        raise NotImplementedError(f"a loop of unknown length: {loop.name}")
    return int(bounds[0])


def _hbm(x: Instruction) -> int:
    return sum(buffer.size for buffer in x.buffers if buffer.hbm)


def _size(x: Instruction) -> int:
    return sum(buffer.size for buffer in x.buffers)


def _core(x: Instruction, inside: Computation) -> int:
    """Bytes of operands and results in a memory of the core."""
    every = (x, *(inside.instructions[name] for name in x.operands))
    return sum(_size(one) - _hbm(one) for one in every)


def _all(x: Instruction, inside: Computation) -> float:
    """Every operand read, every result written."""
    return _hbm(x) + sum(_hbm(inside.instructions[name]) for name in x.operands)


def _other(x: Instruction, inside: Computation) -> float:
    operands = [inside.instructions[name] for name in x.operands]
    if x.opcode in NOTHING or x.opcode.endswith(("-done", "-update")):
        return 0.0
    if x.opcode in SLICES:
        return _hbm(x) + (_size(x) if _hbm(operands[0]) else 0)
    if x.opcode in UPDATES:
        change = operands[UPDATES[x.opcode]]
        return _hbm(change) + (_size(change) if _hbm(x) else 0)
    if x.opcode.endswith("slice-start"):
        least = min(buffer.size for buffer in x.buffers[:2])
        return float(sum(least for buffer in x.buffers[:2] if buffer.hbm))
    if x.opcode.endswith("-start") and len(x.buffers) > 1:
        return _hbm(x)  # the results hold the operands
    return _all(x, inside)


def _fusion(x: Instruction, inside: Computation, program: Program) -> float:
    (name,) = called(x, "calls")
    body = program.computations[name]
    total = 0.0
    for operand, parameter in body.given(x.operands):
        if _hbm(inside.instructions[operand]):
            total += _read(parameter, body, program)
    written = _written(body.root, body)
    return total + sum(size for size, buffer in zip(written, x.buffers, strict=True) if buffer.hbm)


def _read(x: Instruction, body: Computation, program: Program) -> float:
    """Bytes of `x` that a fused computation reads."""
    total = 0.0
    for user in body.users(x.name):
        first = user.operands[0] == x.name
        if user.opcode in VIEWS and not user.root:
            total += _read(user, body, program)
        elif user.opcode in UPDATES and first:
            total += _read(user, body, program)  # of what is updated, who else reads it
        elif user.opcode in SLICES and first:
            total += _size(user)
        elif user.opcode == "fusion":
            (name,) = called(user, "calls")
            inner = program.computations[name]
            for operand, parameter in inner.given(user.operands):
                total += _read(parameter, inner, program) if operand == x.name else 0
        else:
            return float(_size(x))
    return min(total, float(_size(x)))


def _written(x: Instruction, body: Computation) -> list[float]:
    """Bytes of each result of a fused computation that are written."""
    operands = [body.instructions[name] for name in x.operands]
    if x.opcode == "tuple":
        return [sum(_written(operand, body)) for operand in operands]
    if x.opcode in VIEWS:
        return _written(operands[0], body)
    if x.opcode in UPDATES:
        return [float(_size(operands[UPDATES[x.opcode]]))]
    return [float(buffer.size) for buffer in x.buffers]
