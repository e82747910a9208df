"""Compaction: many items in one object, that read as before, whenever a process is killed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from random_episodes import random_group, same

from forge_jax.config import UserError
from forge_jax.sched import locks
from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.pool import Pool

ITEMS = (2, 3, 5, 8, 13)


LEASED = 4  # writes of the lease: taken, renewed before the segment and before deletes, given back


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ends at once with whoever held it."""
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.0)


class Killed(BaseException):
    """A process ends here."""


class Mortal:
    """A store that ends the process before, or after, its so many-th write."""

    def __init__(self, inner: ts.KvStore, writes: int, after: bool):
        self._inner, self._left, self._after = inner, writes, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, key: str, value: bytes | None, **conditions: Any) -> Any:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise Killed
        done = self._inner.write(key, value, **conditions)
        if self._left < 0:
            done.result()
            raise Killed
        return done


def filled(items: tuple[int, ...] = ITEMS) -> ts.KvStore:
    store = ts.KvStore.open("memory://").result()
    for item in items:
        Pool(store).put(item, random_group(item))
    return store


def holds(pool: Pool, items: tuple[int, ...] = ITEMS) -> bool:
    return pool.items() == items and all(same(pool.get(i), random_group(i)) for i in items)


def names(store: ts.KvStore, prefix: str) -> list[str]:
    return [k.decode() for k in store.list().result() if k.decode().startswith(prefix)]


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_step_loses_nothing_and_the_next_compaction_ends_it(after: bool) -> None:
    steps = 0
    for steps in itertools.count():
        store = filled()
        try:
            Pool(Mortal(store, steps, after)).compact(ITEMS[:4])  # type: ignore[arg-type]
        except Killed:
            assert holds(Pool(store))
            Pool(store).compact(ITEMS[:4])
            assert holds(Pool(store))
            assert names(store, "items/") == ["items/000000000013"]
            assert len(names(store, "segments/")) == 1
        else:
            break
    assert steps == 1 + 4 + LEASED, "one segment is written, four objects are deleted"


@pytest.mark.usefixtures("brief")
def test_a_kill_at_any_step_of_a_delete_removes_no_other_item() -> None:
    for steps in itertools.count():
        store = filled()
        Pool(store).compact(ITEMS)
        try:
            Pool(Mortal(store, steps, False)).delete([3, 8])  # type: ignore[arg-type]
        except Killed:
            assert all(same(Pool(store).get(i), random_group(i)) for i in (2, 5, 13))
            Pool(store).delete([3, 8])
            assert holds(Pool(store), (2, 5, 13))
        else:
            break
    assert holds(Pool(store), (2, 5, 13))
    assert steps > 4


def test_a_compacted_item_is_put_as_one_that_is_not() -> None:
    pool = Pool(store := filled())
    assert pool.compact(ITEMS) == 5
    assert pool.compact(ITEMS) == 0
    assert not pool.put(3, random_group(3))
    with pytest.raises(ValueError, match="other episodes under items/000000000003"):
        pool.put(3, random_group(3, largest=5))
    assert names(store, "items/") == []
    assert pool.put(4, random_group(4))
    assert holds(pool, (2, 3, 4, 5, 8, 13))


def test_a_reader_follows_what_another_compacts() -> None:
    reader = Pool(store := filled())
    assert holds(reader)
    Pool(store).compact(ITEMS[:3])
    assert holds(reader)
    Pool(store).compact(ITEMS[3:])
    assert holds(reader)
    Pool(store).delete([2])
    assert holds(reader, ITEMS[1:])
    with pytest.raises(KeyError):
        reader.get(2)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_item_of_a_segment_is_put_aside_alone(tmp_path: Path, damage: str) -> None:
    pool = Pool.open(str(tmp_path))
    for item in ITEMS:
        pool.put(item, random_group(item))
    pool.compact(ITEMS)
    [file] = (tmp_path / "segments").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-3] if damage == "cut" else data[:-3] + b"???")
    with pytest.raises(CorruptObject, match="items/000000000013"):
        Pool.open(str(tmp_path)).get(13)
    assert holds(Pool.open(str(tmp_path)), ITEMS[:-1])
    assert pool.corrupt() == (13,)
    assert pool.put(13, random_group(13))
    assert holds(Pool.open(str(tmp_path)))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_segment_with_a_damaged_index_is_put_aside(tmp_path: Path, damage: str) -> None:
    pool = Pool.open(str(tmp_path))
    for item in ITEMS:
        pool.put(item, random_group(item))
    pool.compact(ITEMS[:4])
    [file] = (tmp_path / "segments").iterdir()
    data = file.read_bytes()
    broken = data[:90] if damage == "cut" else data[:50] + b"????" + data[54:]
    file.write_bytes(broken)
    assert holds(Pool.open(str(tmp_path)), (13,))
    assert (tmp_path / "corrupt-segments" / file.name).read_bytes() == broken


def test_a_key_that_is_no_segments_is_named(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    pool.put(2, random_group(2))
    pool.compact([2])
    (tmp_path / "segments" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        Pool.open(str(tmp_path)).items()
