"""What a plan is asked for."""

from dataclasses import dataclass
from typing import Any

from experiments.planning.topology import Topology
from forge_jax.config import DTYPES, REMAT, MeshConfig, UserError, check, load

# What is planned, and the keys that only it has a use for.
WHAT = {"train": ("tokens_per_step", "remat", "tile"), "decode": ("slots",)}
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
    remat: str | None = None
    dtype: str = "bfloat16"
    tile: int | None = None
    compile: int | None = None
    reserve_gib: float = 0.5
    cache: str | None = None

    def __post_init__(self) -> None:
        known = {"what": tuple(WHAT), "dtype": DTYPES, "remat": (None, *REMAT)}
        for name, those in known.items():
            said, listed = getattr(self, name), ", ".join(filter(None, those))
            check(said in those, f"{name}={said!r} must be one of {listed}")
        check(self.context >= 2, f"context={self.context} must be at least 2")
        for name in ("slices", "compile", "tokens_per_step", "slots", "tile"):
            said = getattr(self, name)
            check(said is None or said >= 1, f"{name}={said} must be at least 1")
        check(self.tile is None or self.tile % 128 == 0, f"tile={self.tile} must divide by 128")
        check(self.reserve_gib >= 0, f"reserve_gib={self.reserve_gib} must be >= 0")
        check(
            (self.tokens_per_step or 0) % self.context == 0,
            f"tokens_per_step={self.tokens_per_step} must be a multiple of context={self.context}",
        )
        for what, names in WHAT.items():
            for name in names:
                said = getattr(self, name)
                check(what == self.what or said is None, f"{name}={said} is for what={what} only")
        check(
            self.mesh is None or self.compile is None,
            f"compile={self.compile} is for mesh=auto only",
        )

    @property
    def remembered(self) -> str:
        """What layers keep for the backward pass, see `forge_jax.models.remat`."""
        return self.remat or "block"

    @property
    def compiled(self) -> int:
        """How many of the best meshes are compiled."""
        return self.compile or 2


def sequences(cfg: PlanConfig, topology: Topology) -> int:
    """Of an update."""
    if cfg.tokens_per_step is None:
        return max(1, topology.chips // CHIPS)
    return cfg.tokens_per_step // cfg.context


def slots(cfg: PlanConfig, topology: Topology) -> int:
    """Sequences decoded at once."""
    return cfg.slots or topology.devices


def read(mapping: dict[str, Any]) -> PlanConfig:
    """The plan that a command line asks for. Raises UserError."""
    mesh = mapping["mesh"]
    if isinstance(mesh, str):
        if mesh != "auto":
            raise UserError(f"mesh={mesh!r} must be auto or sizes such as {{fsdp:8,context:4}}")
        mesh = None
    return load(PlanConfig, mapping | {"mesh": mesh})
