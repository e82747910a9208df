"""Pages from one mesh to another: the same numbers, however heads are cut."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, Sharding

from forge_jax.rollout.moving import MOVED, Parcel, carried, chunks, copied
from forge_jax.rollout.packets import SCRATCH
from forge_jax.rollout.tiers.payload import Page, pages_of, parts_of
from forge_jax.sharding import automatic, make_mesh

CUTS = ({"tensor": 4}, {"tensor": 2}, {"data": 2, "tensor": 2}, {"fsdp": 2}, {})


def cut(axes: dict[str, int], first: int) -> Sharding:
    mesh = make_mesh(**axes, devices=jax.devices()[first:])
    return automatic(NamedSharding(mesh, jax.P(None, None, None, "tensor")))


@pytest.mark.parametrize("axes", list(itertools.product(range(len(CUTS)), repeat=2)))
def test_pages_are_the_same_on_another_mesh(axes: tuple[int, int]) -> None:
    """On devices that both have, and on others."""
    data = np.arange(3 * 2 * 2 * 4 * 2 * 5, dtype=np.float32).reshape(3, 2, 2, 4, 2, 5)
    here = jax.device_put(data, cut(CUTS[axes[0]], 0))
    for first in (0, 4):
        where = cut(CUTS[axes[1]], first)
        for move in (carried, copied):
            found = move(here, where)
            assert found.sharding == where
            np.testing.assert_array_equal(np.asarray(found), data)


@pytest.mark.parametrize("count", [1, MOVED, MOVED + 1])
@pytest.mark.parametrize("modules", [0, 2])
def test_pages_of_the_host_go_in_whole_and_come_out_one_by_one(count: int, modules: int) -> None:
    rng = np.random.default_rng(0)
    pages = [
        Page(rng.normal(size=(2, 2, 2, 4, 3)), None, rng.normal(size=(2, 5)) if modules else None)
        for _ in range(count)
    ]
    parts = parts_of(pages)
    assert [len(part) for part in chunks(range(1, count + 1))] == [MOVED] * len(parts)
    found = [page for part in parts for page in pages_of(part, [None] * MOVED)]
    for one, other in zip(pages, found, strict=False):
        np.testing.assert_array_equal(one.kv, other.kv)
        if modules:
            np.testing.assert_array_equal(one.tails, other.tails)
    assert not any(page.kv.any() for page in found[count:])
    parcel = Parcel(version=0, start=0, routes=(None,) * count, parts=parts)
    assert parcel.nbytes == sum(page.nbytes for page in pages)


def test_what_fills_up_is_scratch() -> None:
    assert chunks([]) == []
    [part] = chunks([7])
    assert part.tolist() == [7] + [SCRATCH] * (MOVED - 1)
