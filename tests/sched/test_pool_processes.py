"""Writers and a reader in processes of their own, killed at random moments, on files and on S3.

Two writers put every item, so each number is raced for, and two compact. What a writer was
told is stored stays; what is read is whole; counts are exact once the survivors are done.
POOL_CHAOS_SECONDS=600 goes on for longer.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_episodes import random_group, same
from s3_endpoint import s3_bucket

from forge_jax.sched.pool import Pool

SECONDS = float(os.environ.get("POOL_CHAOS_SECONDS", "3"))
ITEMS, LARGEST = 60, 3000

WRITER = """
import sys
from random_episodes import random_group
from forge_jax.sched.pool import Pool
pool, first, last, largest = Pool.open(sys.argv[1]), *map(int, sys.argv[2:])
print("ready", flush=True)
for item in range(first, last):
    stored = pool.put(item, random_group(item, largest))
    print(item, int(stored), flush=True)
"""
READER = """
import sys, time
from random_episodes import random_group, same
from forge_jax.sched.pool import Pool
pool, largest = Pool.open(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    for item in pool.items():
        assert same(pool.get(item), random_group(item, largest)), item
    time.sleep(0.01)
"""
COMPACTOR = """
import sys, time
from forge_jax.sched import locks
from forge_jax.sched.pool import Pool
locks.LEASE_SECONDS = 0.5  # of one that is killed
pool = Pool.open(sys.argv[1])
print("ready", flush=True)
while True:
    try:
        pool.compact(pool.loose()[:-4])
    except locks.PoolBusy:
        time.sleep(0.01)
"""


@pytest.fixture(params=["file", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "pool")
    else:
        with s3_bucket() as bucket:
            yield f"{bucket}/runs/first"


class Child:
    """A process that runs `code`, and is ready once this has been made."""

    def __init__(self, code: str, *arguments: object):
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=self._err, text=True, cwd=Path(__file__).parent.parent,
        )  # fmt: skip

    def ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> list[list[str]]:
        """The words of each line it said; fails where it ended by itself with an error."""
        with self._process, self._err:
            assert self._process.stdout is not None
            lines = self._process.stdout.read().split("\n")[:-1]
            status = self._process.wait()
            self._err.seek(0)
            assert status in (0, -signal.SIGKILL), self._err.read()
        return [line.split() for line in lines]


def test_nothing_is_lost_doubled_or_seen_in_part(location: str) -> None:
    rng, first = random.Random(0), 0
    told: set[int] = set()
    ends = time.monotonic() + SECONDS
    while first < ITEMS and (time.monotonic() < ends or first == 0):
        writers = [Child(WRITER, location, first, first + ITEMS, LARGEST) for _ in range(2)]
        others = [Child(READER, location, LARGEST), *(Child(COMPACTOR, location) for _ in "12")]
        for process in (*writers, *others):
            process.ready()
        time.sleep(rng.uniform(0.05, 0.5))
        for process in rng.sample([*writers, *others], 5):
            process.kill()
            time.sleep(rng.uniform(0, 0.05))
        for process in others:
            process.end()
        answers = [writer.end() for writer in writers]
        won = [item for one in answers for item, stored in one if stored == "1"]
        assert len(won) == len(set(won)), "an item was stored twice"
        told |= {int(item) for one in answers for item, _ in one}
        stored = Pool.open(location).items()
        assert told <= set(stored), "an acknowledged item is lost"
        first = len(stored)
        assert stored == tuple(range(first)), "each writer puts in order"

    Child(WRITER, location, 0, first + 5, LARGEST).end()
    pool = Pool.open(location)
    assert pool.items() == tuple(range(first + 5))
    assert pool.corrupt() == ()
    wanted = [random_group(item, LARGEST) for item in range(first + 5)]
    assert all(same(pool.get(item), group) for item, group in enumerate(wanted))
    assert [pool.put(item, group) for item, group in enumerate(wanted)] == [False] * len(wanted)


def test_of_two_that_race_for_an_item_the_first_wins(location: str) -> None:
    sizes = (LARGEST, LARGEST + 1)  # other episodes under the same numbers
    pool = Pool.open(location)
    racers = [Child(RACER, location, size) for size in sizes]
    for racer in racers:
        racer.ready()
    pool.put(ITEMS, ())  # go
    answers = [[word for (word,) in racer.end()] for racer in racers]
    assert all(len(answer) == 20 for answer in answers)
    for item, results in enumerate(zip(*answers, strict=True)):
        groups = [random_group(item, size) for size in sizes]
        assert sorted(results) == ["same" if same(*groups) else "refused", "stored"]
        assert same(pool.get(item), groups[results.index("stored")])


RACER = """
import sys
from random_episodes import random_group
from forge_jax.sched.pool import Pool
pool, largest = Pool.open(sys.argv[1]), int(sys.argv[2])
groups = [random_group(item, largest) for item in range(20)]
print("ready", flush=True)
while not pool.loose():
    pass
for item, group in enumerate(groups):
    try:
        print("stored" if pool.put(item, group) else "same", flush=True)
    except ValueError:
        print("refused", flush=True)
"""
