"""Which page goes down to which tier, and that nothing below the device harms what is above."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from faulty_store import FORMAT, PATIENCE, Faulty, key, page_store, random_page, same, until

from forge_jax.rollout.moving import Pages
from forge_jax.rollout.tiers.host import HostPages, pinned
from forge_jax.rollout.tiers.tiers import PENDING, Staged, Tiers

ROOT, NEXT, LAST = b"r" * 32, b"s" * 32, b"t" * 32


def staged(numbers: list[int], hot: bool, root: bytes = ROOT) -> Staged:
    """Pages, and two places of padding after them, as a call of the device leaves them."""
    pages = [random_page(number) for number in numbers]
    kv = np.stack([page.kv for page in pages] + [np.zeros(FORMAT.shape, np.float32)] * 2)
    return Staged(
        root=root,
        keys=tuple(key(number) for number in numbers),
        pages=Pages(kv=jax.device_put(kv)),
        routes=tuple(page.routes for page in pages),
        hot=(hot,) * len(pages),
    )


def settled(tiers: Tiers) -> dict[str, float]:
    until(lambda: tiers.stats()["tier_pages_pending"] == 0)
    assert tiers.stats()["tier_faults"] == 0
    return dict(tiers.stats())


def fetched(tiers: Tiers, numbers: list[int], root: bytes = ROOT) -> list:
    return tiers.fetch(root, [key(n) for n in numbers], FORMAT.tokens).result(10)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


def both(faulty: Faulty, capacity: int = 3) -> Tiers:
    tiers = Tiers(HostPages(capacity), page_store(faulty), PATIENCE)
    tiers.renew(ROOT)
    return tiers


def test_the_host_keeps_the_most_recently_used() -> None:
    host = HostPages(3)
    names = [(ROOT, key(number)) for number in range(5)]
    for number in range(3):
        assert host.put(names[number], random_page(number)) == []
    assert [same(p, random_page(i)) for i, p in enumerate(host.leading(names[:2]))] == [True] * 2
    [(gone, page)] = host.put(names[3], random_page(3))
    assert gone == names[2]
    assert same(page, random_page(2))
    # Of a run that was read, what comes later is given up first: it is of no use alone.
    assert [gone for gone, _ in host.put(names[4], random_page(4))] == [names[1]]
    assert len(host) == 3
    assert host.nbytes == 3 * random_page(0).nbytes
    assert host.put(names[4], random_page(4)) == []
    assert host.nbytes == 3 * random_page(0).nbytes
    assert (host.clear(), len(host), host.nbytes) == (3, 0, 0)


@pytest.mark.parametrize("cut", [False, True])
def test_pages_are_kept_in_pinned_memory(cut: bool) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = jax.NamedSharding(mesh, jax.P(None, None, "tensor")) if cut else whole
    host = HostPages(2, pinned(where))
    host.put((ROOT, key(1)), random_page(1))
    [page] = host.leading([(ROOT, key(1))])
    assert page.kv.sharding.memory_kind == "pinned_host"
    assert same(page, random_page(1))


def test_hot_pages_go_down_to_both_tiers(faulty: Faulty) -> None:
    tiers = both(faulty)
    tiers.keep(staged([1, 2], hot=True))
    found = settled(tiers)
    assert (found["tier_host_pages"], found["tier_store_pages_written"]) == (2, 2)
    pages = tiers.at_hand(ROOT, [key(1), key(2), key(3)])
    assert [same(page, random_page(n)) for n, page in enumerate(pages, 1)] == [True, True]
    other = both(faulty)  # another engine, on the same store
    assert [same(p, random_page(n)) for n, p in enumerate(fetched(other, [1, 2, 3]), 1)] == [
        True
    ] * 2
    assert len(other.at_hand(ROOT, [key(1), key(2)])) == 2  # they are in its host now
    assert other.at_hand(NEXT, [key(1)]) == []


def test_what_is_given_up_goes_down_one_tier_at_a_time(faulty: Faulty) -> None:
    tiers = both(faulty)
    tiers.keep(staged([1, 2, 3], hot=False))
    assert settled(tiers)["tier_store_pages_written"] == 0
    tiers.keep(staged([4, 5], hot=False))
    assert settled(tiers)["tier_store_pages_written"] == 2
    assert len(tiers.at_hand(ROOT, [key(3), key(4), key(5)])) == 3
    assert [same(p, random_page(n)) for n, p in enumerate(fetched(tiers, [1, 2]), 1)] == [True] * 2
    # These two pushed out others in turn, which are stored as well.
    assert settled(tiers)["tier_store_pages_written"] == 4


def test_without_a_host_tier_pages_go_to_the_store_at_once(faulty: Faulty) -> None:
    tiers = Tiers(None, page_store(faulty), PATIENCE)
    tiers.renew(ROOT)
    tiers.keep(staged([1], hot=False))
    assert settled(tiers)["tier_store_pages_written"] == 1
    assert tiers.at_hand(ROOT, [key(1)]) == []
    assert same(fetched(tiers, [1])[0], random_page(1))


def test_the_host_tier_alone_asks_no_store() -> None:
    tiers = Tiers(HostPages(2), None, PATIENCE)
    tiers.keep(staged([1, 2, 3], hot=True))
    assert settled(tiers)["tier_host_pages"] == 2
    assert not tiers.pays(10**9)


def test_pages_of_older_weights_go(faulty: Faulty) -> None:
    tiers = both(faulty)
    tiers.keep(staged([1, 2], hot=True))
    settled(tiers)
    tiers.renew(NEXT)
    found = settled(tiers)
    assert (found["tier_invalidated"], found["tier_host_pages"]) == (2, 0)
    assert tiers.at_hand(ROOT, [key(1)]) == []
    assert len(faulty.names()) == 2  # an engine that is a step behind finds them
    tiers.keep(staged([1], hot=True, root=NEXT))
    settled(tiers)
    tiers.renew(LAST)
    settled(tiers)
    assert [name.split("/")[0] for name in faulty.names()] == [NEXT.hex()]


def test_weights_that_come_back_keep_their_pages(faulty: Faulty) -> None:
    tiers = both(faulty)
    tiers.keep(staged([1], hot=True))
    settled(tiers)
    for root in (NEXT, ROOT, ROOT, LAST):
        tiers.renew(root)
    settled(tiers)
    assert [name.split("/")[0] for name in faulty.names()] == [ROOT.hex()]


def test_a_store_behind_on_its_writes_costs_pages_but_no_memory(faulty: Faulty) -> None:
    faulty.silent = True
    store = page_store(faulty, replace(PATIENCE, write=1.0, failures=10**6))
    tiers = Tiers(None, store, PATIENCE)
    tiers.renew(ROOT)
    numbers = list(range(PENDING + 40))
    for first in range(0, len(numbers), 8):
        tiers.keep(staged(numbers[first : first + 8], hot=True))
        until(lambda: tiers.stats()["tier_pages_pending"] != 8 or faulty.writes)
    assert tiers.stats()["tier_pages_dropped"] >= 24
    assert tiers.stats()["tier_pages_pending"] <= PENDING + 8
    faulty.silent = False
    until(lambda: tiers.stats()["tier_pages_pending"] == 0, 60)


def test_a_slow_fetch_gives_what_is_there_in_time(faulty: Faulty) -> None:
    patient = Tiers(None, page_store(faulty), PATIENCE)
    patient.renew(ROOT)
    patient.keep(staged([1, 2], hot=True))
    settled(patient)
    faulty.silent = True
    hasty = Tiers(None, page_store(faulty), replace(PATIENCE, base=0.05))
    began = time.monotonic()
    assert fetched(hasty, [1, 2]) == []
    assert time.monotonic() - began < 2.0
