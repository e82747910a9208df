"""Pages in a shared store: whole or not at all, whatever the store does."""

import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from faulty_store import FORMAT, PATIENCE, Faulty, key, page_store, random_page, same

from forge_jax.config import UserError
from forge_jax.rollout.tiers.cost import FetchCost
from forge_jax.rollout.tiers.location import open_store
from forge_jax.rollout.tiers.payload import CorruptPage, PageFormat, decode, encode
from forge_jax.rollout.tiers.store import PageStore, object_name

ROOT, OTHER = b"r" * 32, b"s" * 32


def soon() -> float:
    return time.monotonic() + 10.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routes", [None, (4, 3, 2)])
def test_a_page_comes_back_bit_by_bit(dtype: str, routes: tuple[int, ...] | None) -> None:
    form = PageFormat(
        shape=(3, 2, 2, 4, 8),
        dtype=dtype,
        routes=routes,
        routes_dtype=None if routes is None else "int8",
    )
    rng = np.random.default_rng(1)
    kv = rng.integers(0, 256, (*form.shape[:-1], 8 * jnp.dtype(dtype).itemsize)).astype(np.uint8)
    page = replace(random_page(0, form if dtype == "float32" else FORMAT), kv=kv.view(dtype))
    page = replace(page, routes=page.routes if routes else None)
    back = decode(encode(key(1), page), key(1), form)
    assert back.kv.dtype == jnp.dtype(dtype)
    assert back.kv.tobytes() == page.kv.tobytes()  # NaNs and all
    assert (back.routes is None) == (routes is None)
    assert routes is None or np.array_equal(back.routes, page.routes)


def test_every_missing_added_or_changed_byte_is_seen() -> None:
    data = encode(key(1), random_page(0))
    for size in [*range(60), len(data) - 1]:
        with pytest.raises(CorruptPage):
            decode(data[:size], key(1), FORMAT)
    with pytest.raises(CorruptPage):
        decode(data + b"\0", key(1), FORMAT)
    for place in [*range(80), *range(80, len(data), 97)]:
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CorruptPage):
            decode(bytes(damaged), key(1), FORMAT)


def test_an_intact_object_of_another_key_or_format_is_refused() -> None:
    data = encode(key(1), random_page(0))
    with pytest.raises(CorruptPage):
        decode(data, key(2), FORMAT)
    others = (
        replace(FORMAT, shape=(3, 2, 4, 2, 8)),
        replace(FORMAT, dtype="int32"),
        replace(FORMAT, routes=None, routes_dtype=None),
        replace(FORMAT, routes=(4, 2, 3)),
    )
    for other in others:
        with pytest.raises(CorruptPage):
            decode(data, key(1), other)


def test_the_longest_leading_run_is_read() -> None:
    faulty = Faulty()
    store = page_store(faulty)
    for number in (0, 1, 2, 3, 4, 5, 6, 8):
        assert store.write(ROOT, key(number), random_page(number))
    keys = [key(number) for number in range(10)]
    pages = page_store(faulty).read(ROOT, keys, soon())
    assert len(pages) == 7
    assert all(same(page, random_page(number)) for number, page in enumerate(pages))
    assert store.read(OTHER, keys, soon()) == []
    assert store.read(ROOT, keys[7:], soon()) == []
    assert store.totals()["hits"] == 0
    assert store.totals()["misses"] == 13


def test_a_page_is_written_once_by_an_engine() -> None:
    faulty = Faulty()
    store = page_store(faulty)
    for _ in range(3):
        assert store.write(ROOT, key(1), random_page(1))
    assert faulty.writes == 1
    other = page_store(faulty)
    assert len(other.read(ROOT, [key(1)], soon())) == 1
    assert other.write(ROOT, key(1), random_page(1))
    assert faulty.writes == 1  # it was seen there


@pytest.mark.parametrize("damage", [{"cut": 1}, {"cut": 10_000}, {"flip": 3}, {"flip": -1}])
def test_a_damaged_object_is_a_miss_removed_and_may_be_written_again(damage: dict) -> None:
    faulty = Faulty()
    assert page_store(faulty).write(ROOT, key(0), random_page(0))
    for name, value in damage.items():
        setattr(faulty, name, value)
    store = page_store(faulty)
    assert store.read(ROOT, [key(0)], soon()) == []
    totals = store.totals()
    assert (totals["corrupt"], totals["tombstones"], totals["hits"]) == (1, 1, 0)
    faulty.cut, faulty.flip = 0, None
    reads = faulty.reads
    assert store.read(ROOT, [key(0)], soon()) == []
    assert faulty.reads == reads  # not asked for again
    assert faulty.names() == []
    assert store.write(ROOT, key(0), random_page(0))
    assert store.totals()["tombstones"] == 0
    assert same(store.read(ROOT, [key(0)], soon())[0], random_page(0))


def test_a_replacement_of_a_damaged_object_is_not_removed() -> None:
    faulty = Faulty()
    name = object_name(ROOT, key(0))
    faulty.inner.write(name, b"damaged").result()
    read, done = faulty.read, []

    def then_replaced(asked: str):
        found = read(asked)
        if not done:
            done.append(faulty.inner.write(name, encode(key(0), random_page(0))).result())
        return found

    faulty.read = then_replaced  # type: ignore[method-assign]
    assert page_store(faulty).read(ROOT, [key(0)], soon()) == []
    assert same(page_store(faulty).read(ROOT, [key(0)], soon())[0], random_page(0))


def test_a_failed_write_is_not_believed() -> None:
    faulty = Faulty(write_error=ValueError("out of space"))
    store = page_store(faulty)
    assert not store.write(ROOT, key(0), random_page(0))
    assert not store.has(ROOT, key(0))
    assert store.totals()["write_failures"] == 1
    assert store.read(ROOT, [key(0)], soon()) == []
    assert faulty.reads == 0  # a tombstone stands
    faulty.write_error = None
    assert store.write(ROOT, key(0), random_page(0))
    assert len(store.read(ROOT, [key(0)], soon())) == 1


def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    faulty = Faulty(read_error=OSError("gone"))
    store = page_store(faulty, replace(PATIENCE, rest=0.2))
    for number in range(6):
        assert store.read(ROOT, [key(number)], soon()) == []
    assert faulty.reads == 3
    assert not store.write(ROOT, key(9), random_page(9))
    assert (faulty.writes, store.totals()["writes_skipped"]) == (0, 1)
    faulty.read_error = None
    time.sleep(0.25)
    assert store.write(ROOT, key(9), random_page(9))
    assert len(store.read(ROOT, [key(9)], soon())) == 1
    assert store.totals()["read_failures"] == 3


def test_a_store_that_does_not_answer_costs_the_patience_alone() -> None:
    faulty = Faulty(silent=True)
    store = page_store(faulty, replace(PATIENCE, write=0.05))
    began = time.monotonic()
    assert store.read(ROOT, [key(i) for i in range(4)], time.monotonic() + 0.05) == []
    assert not store.write(ROOT, key(0), random_page(0))
    assert time.monotonic() - began < 2.0
    assert store.totals()["read_timeouts"] == 1


def test_what_came_in_time_is_used() -> None:
    faulty = Faulty()
    store = page_store(faulty)
    for number in range(4):
        store.write(ROOT, key(number), random_page(number))
    read = faulty.read

    def slow(name: str):
        faulty.silent = name.endswith(key(2).hex())
        return read(name)

    faulty.read = slow  # type: ignore[method-assign]
    pages = store.read(ROOT, [key(i) for i in range(4)], time.monotonic() + 0.1)
    assert [same(page, random_page(i)) for i, page in enumerate(pages)] == [True, True]


def test_a_root_is_dropped_alone() -> None:
    faulty = Faulty()
    store = page_store(faulty)
    for root in (ROOT, OTHER):
        store.write(root, root, random_page(0))
    store.drop(ROOT)
    assert faulty.names() == [object_name(OTHER, OTHER)]


def test_files_are_whole_and_outlive_the_engine(tmp_path) -> None:
    for location in (str(tmp_path / "a"), f"file://{tmp_path}/b"):
        store, seconds = open_store(location)
        assert 0 < seconds < 20
        written = PageStore(store, FORMAT, FetchCost(seconds, float("inf")), PATIENCE)
        assert written.write(ROOT, key(1), random_page(1))
        again = PageStore(open_store(location)[0], FORMAT, FetchCost(seconds, 1.0), PATIENCE)
        assert same(again.read(ROOT, [key(1)], soon())[0], random_page(1))
    files = [path.name for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert files == [key(1).hex()]  # neither the probe nor a lock stays


@pytest.mark.parametrize("location", ["", "ftp://x/y", "/proc/none", '{"driver": "zip"}'])
def test_a_store_that_cannot_be_opened_is_named(location: str) -> None:
    with pytest.raises(UserError, match="store="):
        open_store(location)


def test_fetching_pays_from_the_break_even_on() -> None:
    cost = FetchCost(latency=0.1, prefill=0.002)
    assert not cost.pays(50)
    assert cost.pays(51)
    for _ in range(60):
        cost.observe(first=0.1, rest=0.1, tokens=100)
    assert not cost.pays(99)
    assert cost.pays(101)
    for _ in range(60):
        cost.observe(first=0.1, rest=1.0, tokens=100)
    assert not cost.pays(10**9)
