"""What the compiler says of a program: its memory, what it moves, and how long that took.

A traced program flows in, findings flow out. A program that does not fit into the memory of a
chip is a finding too, with what it would have wanted. Findings are kept in files, so that a
search that was interrupted goes on where it was.
"""

import hashlib
import inspect
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.planning import counting, hlo, partitioned, traffic
from experiments.planning.programs import Program
from experiments.planning.roofline import Seconds, seconds
from experiments.planning.topology import Topology

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The two sentences in which the compiler says that memory ran out.
WANTED = (
    re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds"),
)

# What findings are read off with: where one of these changes, they are found anew.
READERS = (hlo, traffic, partitioned, counting, sys.modules[__name__])


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one compilation."""

    parts: dict[str, float]  # bytes on a device, by what they are of
    moved: float | None  # bytes to and from memory; None where memory ran out
    compile_seconds: float
    flops: float = 0.0  # by the compiler, a loop's body once
    sent: list[tuple[str, list[str], bool, float]] = field(default_factory=list)  # `Sent`, bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """One program on one device."""

    program: Program
    work: counting.Work
    facts: Facts
    seconds: Seconds

    @property
    def parts(self) -> dict[str, float]:
        """Bytes while it runs, with what lives beside it."""
        named = ({self.program.names.get(key, key): n} for key, n in self.facts.parts.items())
        return counting.added(*named, self.program.beside)

    @property
    def memory(self) -> float:
        """The sum of `parts`."""
        return sum(self.parts.values())


def found(program: Program, topology: Topology, mesh: Mesh, cache: Path | None) -> Found:
    """Counts and compiles `program`; looks into the folder `cache` before.

    Raises what the compiler raises but for want of memory.
    """
    lowered = program.traced.lower()
    file = None if cache is None else cache / f"{_name(program, lowered, topology)}.json"
    if file is not None and file.is_file():
        facts = Facts(**json.loads(file.read_text(encoding="utf-8")))
    else:
        facts = compiled(program, lowered, mesh)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(facts)), encoding="utf-8")
            partial.replace(file)
    work = _work(program, facts, mesh)
    timed = seconds(work, facts.moved or 0.0, topology, mesh)
    return Found(program=program, work=work, facts=facts, seconds=timed)


def _work(program: Program, facts: Facts, mesh: Mesh) -> counting.Work:
    if not program.partitioned:
        known = counting.Known(mesh=dict(mesh.shape), live=program.live, taken=program.taken)
        return counting.count(program.traced.jaxpr, known)
    sent = {
        counting.Sent(kind, tuple(axes), weights): size for kind, axes, weights, size in facts.sent
    }
    return counting.Work(flops=facts.flops, passes=facts.flops, sent=sent)


def compiled(program: Program, lowered: Any, mesh: Mesh) -> Facts:
    """Compiles; raises what the compiler raises but for want of memory."""
    began = time.perf_counter()
    try:
        made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        wanted = out_of_memory(str(error))
        if wanted is None:
            raise
        took = time.perf_counter() - began
        return Facts(parts={"program": wanted}, moved=None, compile_seconds=took)
    took, read = time.perf_counter() - began, hlo.parse(made.as_text())
    sent = partitioned.sent(read, mesh) if program.partitioned else {}
    return Facts(
        parts=_memory(made.memory_analysis()),
        moved=traffic.moved(read, program.live, program.taken),
        compile_seconds=took,
        flops=made.cost_analysis()["flops"],
        sent=[(key.kind, list(key.axes), key.weights, size) for key, size in sent.items()],
    )


def out_of_memory(message: str) -> float | None:
    """Bytes that a program wanted, by what the compiler says; None for another complaint."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in WANTED:
        said = pattern.search(message)
        if said:
            return float(said[1]) * UNITS[said[2]]
    return None


def _memory(stats: Any) -> dict[str, float]:
    """Arguments that are given back as results count once."""
    return {
        "arguments": float(stats.argument_size_in_bytes),
        "results": float(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        "temporaries": float(stats.temp_size_in_bytes),
        "code": float(stats.generated_code_size_in_bytes),
    }


def _name(program: Program, lowered: Any, topology: Topology) -> str:
    """Of everything that findings depend on."""
    said = [topology.name, str(topology.slices), str(program.live), str(program.taken)]
    said += [metadata.version(package) for package in ("jax", "libtpu")]
    said += [inspect.getsource(module) for module in READERS]
    text = "\n".join([*said, lowered.as_text()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
