"""Names of slices, and the links that mesh axes lie along."""

import math

import jax
import numpy as np
import pytest

from experiments.planning import topology
from experiments.planning.counting import Sent, Work
from experiments.planning.roofline import Seconds, seconds
from experiments.planning.topology import devices, ici_rate, links, parse
from forge_jax.config import UserError
from forge_jax.sharding import AXES


@pytest.mark.parametrize(
    ("said", "name", "chips"),
    [
        ("v5p:8x8x8", "v5p:8x8x8", 512),
        ("v5p-1024", "v5p:8x8x8", 512),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v4-512", "v4:4x8x8", 256),
        ("v5e-256", "v5e:16x16", 256),
        ("v5e-8", "v5e:2x4", 8),
        ("v6e-128", "v6e:8x16", 128),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4),
    ],
)
def test_a_name_is_a_shape(said: str, name: str, chips: int) -> None:
    found = parse(said)
    assert (found.name, found.chips) == (name, chips)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("v5q:4x4", "chip 'v5q' is none of v4, v5e, v5p, v6e, tpu7x"),
        ("v5p:4x4", "v5p has 3 sides"),
        ("v5p:0x4x4", "at least 1 chip"),
        ("v5p", "must be like v5p:8x8x8"),
        ("v5p-12288", "no one shape; name its sides, as v5p:4x4x4"),
        ("v5p-7", "no one shape"),
        ("tpu7x-128", "no one shape; name its sides, as tpu7x:4x4x4"),
    ],
)
def test_what_is_no_slice_is_named(said: str, named: str) -> None:
    with pytest.raises(UserError, match=f"topology='{said}'.*{named}"):
        parse(said)


class Chip:
    def __init__(self, coords: tuple[int, ...]):
        self.coords = coords


def mesh(shape: tuple[int, ...], **sizes: int):
    """A mesh of a torus whose axes lie along its sides in order."""

    class Made:
        axis_names = AXES
        devices = np.empty([sizes.get(axis, 1) for axis in AXES], object)

    Made.shape = dict(zip(AXES, Made.devices.shape, strict=True))
    for i, place in enumerate(np.ndindex(Made.devices.shape)):
        Made.devices[place] = Chip(tuple(np.unravel_index(i % math.prod(shape), shape)))
    return Made


def test_links_of_an_axis_are_those_of_the_sides_it_lies_along() -> None:
    pod = parse("v5p:8x8x8")
    whole = mesh((8, 8, 8), fsdp=64, context=8)
    assert links(pod, whole, ["context"]) == 2, "around one side"
    assert links(pod, whole, ["fsdp"]) == 4, "around two"
    assert links(pod, whole, ["fsdp", "context"]) == 6
    assert links(pod, mesh((8, 8, 8), fsdp=256, tensor=2), ["tensor"]) == 1, "no ring"
    assert ici_rate(pod, whole, ["context"]) == 200e9, "1200 GB/s are 6 links of two directions"
    small = parse("v5e:4x4")
    assert links(small, mesh((4, 4), fsdp=4, context=4), ["fsdp"]) == 1, "v5e closes sides of 16"
    assert links(small, mesh((4, 4), fsdp=16), ["data"]) == math.inf


def test_the_bound_is_the_longest_of_what_goes_on_at_once_and_what_is_waited_for() -> None:
    pod = parse("v5p:8x8x8")
    sizes = mesh((8, 8, 8), fsdp=64, context=8)
    sent = {
        Sent("all_gather", ("fsdp",), True): 400e9,
        Sent("psum", ("context",), False): 20e9,
    }
    found = seconds(Work(flops=1.0, passes=459e12, sent=sent), 2765e9 / 2, pod, sizes)
    assert found == Seconds(compute=1.0, hbm=0.5, lending=1.0, waiting=0.1)
    assert found.bound == pytest.approx(1.1)
    assert found.times(3).bound == pytest.approx(3.3)
    assert Seconds(hbm=2.0, compute=1.0).limit == "HBM bandwidth"


def test_between_slices_goes_a_slices_part() -> None:
    """A sum over 2 slices of 4: each device reduces a quarter inside, sends that, gathers."""
    pod = parse("v5p:2x2x1", slices=2)
    sizes = mesh((2, 2, 1), slice=2, data=4)
    size = 8e9
    work = Work(sent={Sent("psum", ("data", "slice"), True): 2 * size * 7 / 8})
    found = seconds(work, 0.0, pod, sizes)
    assert found.dcn == pytest.approx(2 * size / 4 * (1 / 2) / 6.25e9)
    assert found.lending == pytest.approx(2 * size * 3 / 4 / 200e9)


def test_devices_are_those_of_the_compiler() -> None:
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    for said in ("v5p:4x4x4", "v4:2x2x1", "v5e:1x1"):
        slice_of = parse(said)
        assert len(devices(slice_of)) == slice_of.devices
    assert {d.slice_index for d in devices(parse("v5e:2x2", slices=2))} == {0, 1}
    with pytest.raises(UserError, match="topology='v5e:3x5'"):
        devices(parse("v5e:3x5"))
    assert jax.default_backend() == "cpu"


def test_only_what_the_compiler_does_not_know_is_the_callers_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the compiler's own fault")

    monkeypatch.setattr(topology, "find_spec", lambda name: name)
    monkeypatch.setattr(topology.topologies, "get_topology_desc", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="own fault"):
        devices(parse("v5e:2x2"))
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match="pip install libtpu"):
        devices(parse("v5e:2x2"))
