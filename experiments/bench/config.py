"""What a benchmark of merging is told to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.peers import Peer
from experiments.replay import ReplayConfig
from experiments.workloads import SHAPES
from forge_jax.config import OptimConfig, PackConfig, check


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_tree.yaml`."""

    workloads: tuple[str, ...]
    model: str
    steps: int = 3
    none_steps: int = 1
    peer_steps: int = 1
    contexts: tuple[int, ...] = ()
    ratio_cap: float = 5.0
    attention: str = "auto"
    seed: int = 0
    out: str | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    pack: PackConfig = field(default_factory=PackConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "none_steps", "peer_steps"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        check(len(self.workloads) > 0, "workloads=[] names none")
        for workload in self.workloads:
            known = f"neither a file nor one of {', '.join(SHAPES)}"
            found = workload in SHAPES or Path(workload).is_file()
            check(found, f"workloads: {workload!r} is {known}")
        names = [workload_name(workload) for workload in self.workloads]
        check(len(set(names)) == len(names), f"workloads={names} has a name twice")
        for length in self.contexts:
            check(length >= 2, f"contexts: {length} must be at least 2")
        self.programs()
        self.replay("", "tree")  # raises what it has to say of the rest

    def programs(self) -> list[Peer]:
        """The peers."""
        return [Peer(name=name, command=said) for name, said in self.peers.items()]

    def replay(self, workload: str, mode: str) -> ReplayConfig:
        """What the process of a mode is told to do."""
        return ReplayConfig(
            workload=workload,
            model=self.model,
            merge=mode,
            ratio_cap=self.ratio_cap,
            attention=self.attention,
            seed=self.seed,
            pack=self.pack,
            optim=self.optim,
        )

    def times(self, merges: bool) -> int:
        """How often a mode is timed: often where it merges anything."""
        return self.steps if merges else min(self.none_steps, self.steps)


def workload_name(workload: str) -> str:
    """What a workload is called in rows and files: its name, or its file's."""
    return workload if workload in SHAPES else Path(workload).stem
