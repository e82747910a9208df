"""What a plan is asked for."""

from dataclasses import dataclass
from typing import Any

from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig, UserError, check, load
from forge_jax.models.remat import REMAT

WHAT = ("train", "decode")
DTYPES = ("bfloat16", "float32")
CHIPS = 16  # for each sequence, unless their number is given


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """See `configs/plan.yaml`."""

    model: str
    topology: str
    context: int
    slices: int = 1
    what: str = "train"
    tokens_per_step: int | None = None
    slots: int | None = None
    mesh: MeshConfig | None = None  # None: the best
    remat: str = "block"
    dtype: str = "bfloat16"
    tile: int | None = None
    compile: int = 2
    reserve_gib: float = 0.5
    cache: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("what", WHAT), ("dtype", DTYPES), ("remat", REMAT)):
            said = getattr(self, name)
            check(said in known, f"{name}={said!r} must be one of {', '.join(known)}")
        check(self.context >= 2, f"context={self.context} must be at least 2")
        for name in ("slices", "compile"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("tokens_per_step", "slots", "tile"):
            said = getattr(self, name)
            check(said is None or said >= 1, f"{name}={said} must be at least 1")
        check(self.tile is None or self.tile % 128 == 0, f"tile={self.tile} must divide by 128")
        check(self.reserve_gib >= 0, f"reserve_gib={self.reserve_gib} must be >= 0")
        check(
            self.tokens_per_step is None or self.tokens_per_step >= self.context,
            f"tokens_per_step={self.tokens_per_step} must hold a sequence of {self.context=}",
        )


def sequences(cfg: PlanConfig, topology: Topology) -> int:
    """Of an update."""
    if cfg.tokens_per_step is None:
        return max(1, topology.chips // CHIPS)
    return cfg.tokens_per_step // cfg.context


def slots(cfg: PlanConfig, topology: Topology) -> int:
    """Sequences decoded at once."""
    return cfg.slots or max(1, topology.chips // CHIPS)


def read(mapping: dict[str, Any]) -> PlanConfig:
    """The plan that a command line asks for. Raises UserError."""
    mesh = mapping["mesh"]
    if isinstance(mesh, str):
        if mesh != "auto":
            raise UserError(f"mesh={mesh!r} must be auto or sizes such as {{fsdp:8,context:4}}")
        mesh = None
    return load(PlanConfig, mapping | {"mesh": mesh})
