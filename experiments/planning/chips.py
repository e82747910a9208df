"""What one chip of each TPU generation can do.

A name goes in, a `Chip` comes out. Peak rates are Google's own
(https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, system architecture);
`hbm` is what the TPU compiler of libtpu leaves to a program, as it says when it runs out.
"""

from dataclasses import dataclass

from forge_jax.config import UserError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Rates and sizes of a chip; FLOPs of bfloat16 products with a multiply-add as two."""

    name: str
    flops: float  # a second
    hbm: float  # bytes
    hbm_rate: float  # bytes a second
    ici: float  # bytes a second over all links to other chips, both directions together
    dcn: float  # bytes a second out to the data center's network
    sides: int  # dimensions of the torus
    wraps: int  # a side that is a multiple of it is closed to a ring
    devices: int  # that jax sees in a chip
    counted: int  # in names such as v5p-1024: TensorCores of a chip, or 1 where chips are meant


CHIPS = {
    chip.name: chip
    for chip in (
        # 32 GiB; links of 2400 Gb/s a direction; 50 Gb/s a chip as in v5p.
        Chip(
            name="v4", flops=275e12, hbm=2 * 15.25 * GIB, hbm_rate=1228e9, ici=600e9, dcn=6.25e9,
            sides=3, wraps=4, devices=2, counted=2,
        ),
        Chip(
            name="v5e", flops=197e12, hbm=15.75 * GIB, hbm_rate=819e9, ici=400e9, dcn=3.125e9,
            sides=2, wraps=16, devices=1, counted=1,
        ),
        Chip(
            name="v5p", flops=459e12, hbm=95.74 * GIB, hbm_rate=2765e9, ici=1200e9, dcn=6.25e9,
            sides=3, wraps=4, devices=1, counted=2,
        ),
        Chip(
            name="v6e", flops=918e12, hbm=31.25 * GIB, hbm_rate=1640e9, ici=800e9, dcn=12.5e9,
            sides=2, wraps=16, devices=1, counted=1,
        ),
        # People's names for its slices count now chips, now cores: none is understood.
        Chip(
            name="tpu7x", flops=2307e12, hbm=2 * 94.75 * GIB, hbm_rate=7380e9, ici=1200e9,
            dcn=12.5e9, sides=3, wraps=4, devices=2, counted=0,
        ),
    )
}  # fmt: skip


def chip(name: str, said: str) -> Chip:
    """The chip called `name` in the topology `said`. Raises UserError listing those known."""
    if name not in CHIPS:
        raise UserError(f"topology={said!r}: chip {name!r} is none of {', '.join(CHIPS)}")
    return CHIPS[name]
