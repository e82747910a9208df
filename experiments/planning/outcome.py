"""What is planned, and what came out: estimates and measurements of one mesh, alike.

A job and a mesh go in; a `Candidate`, by a closed form or by compiling, comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from experiments.planning import counting, decode, estimate, measure, programs, report
from experiments.planning.chips import GIB
from experiments.planning.config import PlanConfig
from experiments.planning.measure import Found
from experiments.planning.roofline import Seconds, by_axes, seconds
from experiments.planning.search import Candidate
from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig
from forge_jax.models.config import ModelConfig
from forge_jax.sharding import mesh_from


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run where."""

    cfg: PlanConfig
    model: ModelConfig
    topology: Topology
    devices: tuple[Any, ...]

    @property
    def limit(self) -> float:
        """Bytes of a chip that a run may use."""
        return self.topology.chip.hbm - self.cfg.reserve_gib * GIB

    @property
    def flops(self) -> float:
        """Of the model in an update or a step of decoding, by the mathematics alone."""
        if self.cfg.what == "decode":
            return decode.model_flops(self.model, self.cfg, self.topology)
        return estimate.model_flops(self.model, self.cfg, self.topology)

    @property
    def at_peak(self) -> float:
        """Seconds of `flops` at the peak rate of all chips."""
        return self.flops / (self.topology.chip.flops * self.topology.chips)

    @property
    def cache(self) -> Path | None:
        """Where findings of the compiler are kept."""
        return None if self.cfg.cache is None else Path(self.cfg.cache)

    def mesh(self, sizes: MeshConfig) -> Mesh:
        """Of the devices to compile for."""
        return mesh_from(sizes, self.devices)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One mesh, compiled."""

    candidate: Candidate
    found: tuple[Found, ...]


def guess(job: Job, sizes: MeshConfig) -> Candidate:
    """By the closed form."""
    mesh, chip = job.mesh(sizes), job.topology.chip
    form = decode if job.cfg.what == "decode" else estimate
    rough = form.rough(job.model, mesh, sizes, job.cfg, job.topology)
    memory = {name: size * chip.devices for name, size in rough.memory.items()}
    parts = [
        (runs, seconds(work, moved, job.topology, mesh)) for runs, work, moved in rough.programs
    ]
    return _candidate(job, sizes, memory, parts)


def compiled(job: Job, sizes: MeshConfig, tell: Callable[[str], Any]) -> Measured:
    """By the compiler."""
    mesh, chip = job.mesh(sizes), job.topology.chip
    make = decode.programs if job.cfg.what == "decode" else programs.train
    found = []
    for program in make(job.model, mesh, sizes, job.cfg, job.topology):
        tell(f"{report.shape(sizes)}: {program.name}")
        found.append(measure.found(program, job.topology, mesh, job.cache))
        facts = found[-1].facts
        ended = "memory ran out" if facts.moved is None else f"{found[-1].memory / GIB:.1f} GiB"
        tell(f"{report.shape(sizes)}: {program.name}: {ended}, {facts.compile_seconds:.0f} s")
    worst = max(found, key=lambda one: one.memory)
    memory = {name: size * chip.devices for name, size in worst.parts.items()}
    parts = [(one.program.runs, one.seconds) for one in found]
    return Measured(candidate=_candidate(job, sizes, memory, parts), found=tuple(found))


def _candidate(
    job: Job, sizes: MeshConfig, memory: dict[str, float], parts: list[tuple[int, Seconds]]
) -> Candidate:
    total = sum((one.times(runs) for runs, one in parts), Seconds())
    return Candidate(
        sizes=sizes,
        memory=memory,
        seconds=total,
        bound=sum(one.bound * runs for runs, one in parts),
        fits=sum(memory.values()) <= job.limit,
    )


def outline(of: Candidate) -> dict[str, Any]:
    """What there is to say of an estimate, for JSON."""
    return {
        "mesh": report.sizes_of(of.sizes),
        "fits": of.fits,
        "hbm_per_chip_bytes": round(of.bytes),
        "roofline_seconds": of.bound,
        "memory": report.numbers(of.memory),
        "seconds": {name: getattr(of.seconds, name) for name in report.BUSY},
    }


def result(job: Job, of: Measured) -> dict[str, Any]:
    """One JSON object of a mesh."""
    chosen, per_chip = of.candidate, job.topology.chip.devices
    work = sum((one.work.times(one.program.runs) for one in of.found), counting.Work())
    complete = all(one.facts.moved is not None for one in of.found)
    moved = sum((one.facts.moved or 0.0) * one.program.runs for one in of.found)
    limit = chosen.seconds.limit if chosen.fits else f"memory: {report.largest(chosen.memory)}"
    return outline(chosen) | {
        "fits": chosen.fits and complete,
        "hbm_limit_bytes": round(job.limit),
        "flops_per_chip": work.flops * per_chip,
        "bytes_per_chip": moved * per_chip if complete else None,
        "mfu_bound": job.at_peak / chosen.bound,
        "collective_bytes": work.sent_bytes * per_chip,
        "compile_seconds": sum(one.facts.compile_seconds for one in of.found),
        "limited_by": limit,
        "collectives": report.numbers(by_axes(work)),
        "model_flops": job.flops,
        "topology": job.topology.name,
        "chips": job.topology.chips,
    }
