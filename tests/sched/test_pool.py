"""The data pool: each item exactly once, whole or not at all, across kills and damage."""

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from random_episodes import random_group, same

from forge_jax.config import UserError
from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.pool import Pool


@pytest.fixture(params=["path", "file://", "memory://"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Pool:
    folder = tmp_path / "a pool, 100% ünusual?"
    locations = {
        "path": str(folder),
        "file://": (tmp_path / "pool").as_uri(),
        "memory://": "memory://",
    }
    return Pool.open(locations[request.param])


def test_items_come_back_in_order_and_exactly(pool: Pool) -> None:
    numbers = random.Random(0).sample(range(2000), 20)
    for number in numbers:
        pool.put(number, random_group(number))
    assert pool.items() == tuple(sorted(numbers))
    for number in numbers:
        assert same(pool.get(number), random_group(number))


def test_threads_share_a_pool(pool: Pool) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: pool.put(n, random_group(n)), range(40)))
        groups = list(threads.map(pool.get, range(40)))
    assert same(tuple(groups), tuple(map(random_group, range(40))))


def test_a_repeated_put_changes_nothing_and_another_is_refused(pool: Pool) -> None:
    group, other = random_group(3), random_group(3, largest=5)
    pool.put(3, group)
    pool.put(3, group)
    with pytest.raises(ValueError, match="other episodes under items/000000000003"):
        pool.put(3, other)
    assert same(pool.get(3), group)
    assert pool.items() == (3,)


def test_an_episode_of_another_item_is_refused(pool: Pool) -> None:
    group = next(g for g in map(random_group, range(9)) if g)
    with pytest.raises(ValueError, match=f"item {group[0].item} put under item 77"):
        pool.put(77, group)
    assert pool.items() == ()


@pytest.mark.parametrize("item", [-1, 10**12])
def test_an_impossible_number_is_refused(pool: Pool, item: int) -> None:
    with pytest.raises(ValueError, match=f"item={item}"):
        pool.put(item, ())


def test_deleting_and_keeping(pool: Pool) -> None:
    for number in range(8):
        pool.put(number, random_group(number))
    pool.delete([2, 3, 99])
    assert pool.items() == (0, 1, 4, 5, 6, 7)
    pool.delete((0, 4, 6, 7))
    assert pool.items() == (1, 5)
    with pytest.raises(KeyError, match="items/000000000002"):
        pool.get(2)
    pool.put(2, random_group(2, largest=3))
    assert same(pool.get(2), random_group(2, largest=3))


def test_a_folder_outlives_its_pool(tmp_path: Path) -> None:
    Pool.open(str(tmp_path / "pool")).put(5, random_group(5))
    assert same(Pool.open((tmp_path / "pool").as_uri()).get(5), random_group(5))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_object_is_put_aside_and_never_handed_out(tmp_path: Path, damage: str) -> None:
    pool = Pool.open(str(tmp_path))
    pool.put(1, random_group(1))
    pool.put(2, random_group(2))
    file = tmp_path / "items" / "000000000001"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    broken = {"cut": data[:-9], "flipped": data, "empty": b"", "foreign": b"PK\3\4" + data}[damage]
    file.write_bytes(broken)

    with pytest.raises(CorruptObject, match="items/000000000001"):
        pool.get(1)
    with pytest.raises(KeyError):
        pool.get(1)
    assert pool.items() == (2,)
    assert pool.corrupt() == (1,)
    assert (tmp_path / "corrupt" / "000000000001").read_bytes() == broken
    pool.put(1, random_group(1))
    assert same(pool.get(1), random_group(1))


def test_a_put_over_a_damaged_object_heals_it(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    pool.put(1, random_group(1))
    (tmp_path / "items" / "000000000001").write_bytes(b"half")
    pool.put(1, random_group(1))
    assert same(pool.get(1), random_group(1))
    assert pool.corrupt() == (1,)


def test_a_key_that_is_no_items_is_named(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    pool.put(1, random_group(1))
    (tmp_path / "items" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        pool.items()


@pytest.mark.parametrize(
    "location",
    ["", "bogus://x", "gs://", "gs://No Bucket/x", "file://relative/x", "http://localhost:1/x"],
)
def test_a_bad_location_is_named(location: str) -> None:
    with pytest.raises(UserError, match=f"pool='{location}'"):
        Pool.open(location)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file' cannot be opened"):
        Pool.open(str(tmp_path / "file"))


def test_what_a_killed_writer_left_does_not_end_up_in_an_object(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    pool.put(1, random_group(1))
    (tmp_path / "items" / "000000000002.__lock").write_bytes(bytes(10**6))
    pool.put(2, random_group(2))
    assert same(pool.get(2), random_group(2))
    assert pool.items() == (1, 2)


WRITER = """
import sys
from random_episodes import random_group
from forge_jax.sched.pool import Pool
pool = Pool.open(sys.argv[1])
print("ready", flush=True)
for item in range(int(sys.argv[2]), 10**6):
    pool.put(item, random_group(item, largest=int(sys.argv[3])))
    print(item, flush=True)
"""
LARGEST = 100_000  # tokens a turn: a write takes long enough to be killed in


def test_a_writer_killed_at_any_moment_leaves_only_whole_items(tmp_path: Path) -> None:
    rng, stored = random.Random(0), 0
    for _ in range(4):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), str(stored), str(LARGEST)]
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.4))
            writer.kill()
            acknowledged = [int(line) for line in writer.stdout.read().split()]
        pool = Pool.open(str(tmp_path))
        items = pool.items()
        assert items[: stored + len(acknowledged)] == tuple(range(stored + len(acknowledged)))
        assert len(items) <= stored + len(acknowledged) + 1, "at most one put was not yet answered"
        for item in items[stored:]:
            assert same(pool.get(item), random_group(item, LARGEST))
        stored = len(items)
    assert stored > 0
