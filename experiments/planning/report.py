"""What a plan tells people: the ranked table and one JSON object.

Candidates and findings flow in; text and a mapping flow out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from experiments.planning.chips import GIB
from experiments.planning.roofline import Seconds
from experiments.planning.search import Candidate
from forge_jax.config import MeshConfig
from forge_jax.sharding import AXES

BUSY = [part.name for part in fields(Seconds)]


def shape(sizes: MeshConfig) -> str:
    """The axes of more than one device."""
    said = [f"{name}={getattr(sizes, name)}" for name in AXES if getattr(sizes, name) > 1]
    return " ".join(said) or "one device"


def table(title: str, rows: Sequence[Candidate], limit: float, flops: float) -> Table:
    """Meshes, best first; `flops` is the model's, of a device, over its peak rate: seconds."""
    made = Table(title=title)
    for column in ("mesh", "fits", "GiB", "seconds", "MFU", "limited by"):
        left = column in ("mesh", "limited by")
        made.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        made.add_row(
            shape(row.sizes),
            "yes" if row.fits else "no",
            f"{row.bytes / GIB:.1f}",
            f"{row.bound:.3g}",
            f"{flops / row.bound:.1%}",
            row.seconds.limit if row.fits else f"memory: {largest(row.memory)}",
        )
    made.caption = f"a chip has {limit / GIB:.2f} GiB; seconds at least, MFU at most"
    return made


def largest(parts: Mapping[str, float]) -> str:
    """What takes most."""
    return max(parts, key=lambda name: parts[name])


def sizes_of(mesh: MeshConfig) -> dict[str, int]:
    """Of all axes, for JSON."""
    return {name: getattr(mesh, name) for name in AXES}


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sums of bytes as whole numbers."""
    return {name: round(value) for name, value in values.items()}
