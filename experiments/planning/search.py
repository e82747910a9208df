"""Which meshes there are over a topology, and which promise most.

A model and a topology go in; meshes ranked by their estimates come out. What a trainer would
refuse is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.planning.config import PlanConfig, slots
from experiments.planning.roofline import Seconds
from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.rl import ranks
from forge_jax.sharding import AXES

INSIDE = AXES[1:]  # of a slice


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh and what is thought of it."""

    sizes: MeshConfig
    memory: dict[str, float]  # bytes on a chip, by what they are of
    seconds: Seconds  # by what is busy, of an update, or of a step of decoding
    bound: float  # seconds that it cannot beat
    fits: bool

    @property
    def bytes(self) -> float:
        """On a chip."""
        return sum(self.memory.values())


def meshes(model: ModelConfig, topology: Topology, cfg: PlanConfig) -> list[MeshConfig]:
    """Every mesh of all devices that the model can be cut over, no two of one effect.

    Raises UserError where there is none.
    """
    found = [
        MeshConfig(slice=topology.slices, **dict(zip(INSIDE, sizes, strict=True)))
        for sizes in _products(topology.devices // topology.slices, len(INSIDE))
    ]
    kept = [sizes for sizes in found if not refusal(sizes, model, topology, cfg)]
    if not model.experts:  # what "expert" cuts then, "fsdp" does
        kept = [sizes for sizes in kept if sizes.expert == 1]
    if not kept:
        raise UserError(f"no mesh of {topology.devices} devices suits the model")
    return kept


def refusal(
    sizes: MeshConfig, model: ModelConfig, topology: Topology, cfg: PlanConfig
) -> str | None:
    """Why a mesh cannot be, in the words of its keys; None where it can."""
    if sizes.context > cfg.context:
        return f"mesh.context={sizes.context} is more than context={cfg.context}"
    places, count = sizes.places * sizes.context, slots(cfg, topology)
    if cfg.what == "decode" and count % places:
        return f"slots={count} must be a multiple of the mesh's {places} places"
    return ranks.refusal(model, vars(sizes))


def check(sizes: MeshConfig, model: ModelConfig, topology: Topology, cfg: PlanConfig) -> None:
    """Raises UserError where `sizes` is no mesh of the topology that suits the model."""
    devices = sizes.places * sizes.context * sizes.tensor
    said = " ".join(f"{name}={getattr(sizes, name)}" for name in AXES if getattr(sizes, name) > 1)
    if devices != topology.devices or sizes.slice != topology.slices:
        raise UserError(
            f"mesh {said or 'of 1'} has {devices} devices in {sizes.slice} slices; "
            f"{topology.name} has {topology.devices} in {topology.slices}"
        )
    refused = refusal(sizes, model, topology, cfg)
    if refused:
        raise UserError(refused)


def ranked(
    found: Iterable[MeshConfig], judge: Callable[[MeshConfig], Candidate], tick: Callable[[], Any]
) -> list[Candidate]:
    """Those that fit first, then by the time that they cannot beat."""
    judged = []
    for sizes in found:
        judged.append(judge(sizes))
        tick()
    return sorted(judged, key=order)


def order(of: Candidate) -> tuple[bool, float]:
    """The best comes first."""
    return not of.fits, of.bound if of.fits else of.bytes


def _products(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `n` as a product of `parts` numbers."""
    if parts == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            for rest in _products(n // first, parts - 1):
                yield (first, *rest)
