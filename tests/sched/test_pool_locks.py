"""One process at a time compacts or deletes; a pool is one run's."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from random_episodes import random_group, same
from s3_endpoint import s3_bucket

from forge_jax.sched import locks
from forge_jax.sched.answers import StoreRefused
from forge_jax.sched.pool import Pool
from forge_jax.stores import spec_of

HOLDER = """
import sys, time
import tensorstore as ts
from pathlib import Path
from forge_jax.sched.locks import keeping
from forge_jax.stores import spec_of
folder = Path(sys.argv[1]) if "://" not in sys.argv[1] else None
with keeping(ts.KvStore.open(spec_of(sys.argv[1])).result(), folder):
    print("held", flush=True)
    time.sleep(3600)
"""


@pytest.fixture(params=["file", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "pool")
    else:
        with s3_bucket() as bucket:
            yield f"{bucket}/runs/first"


def test_two_processes_do_not_compact_or_delete_at_once(location: str) -> None:
    pool = Pool.open(location)
    for item in range(4):
        pool.put(item, random_group(item))
    with held_elsewhere(location):
        for change in (pool.compact, pool.delete):
            with pytest.raises(locks.PoolBusy, match="another process compacts or deletes"):
                change([0, 1])
        assert pool.put(4, random_group(4)), "writers and readers go on"
        assert same(pool.get(0), random_group(0))
    if "://" in location:  # a lease outlives its holder, until its time is over
        with pytest.raises(locks.PoolBusy, match=r"for \d+ s more"):
            pool.delete([0])
        expire(location)
    assert pool.compact([0, 1]) == 2
    pool.delete([0])
    assert pool.items() == (1, 2, 3, 4)


@contextmanager
def held_elsewhere(location: str) -> Iterator[None]:
    """Meanwhile another process compacts or deletes; it is killed at it."""
    command = [sys.executable, "-c", HOLDER, location]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


def expire(location: str) -> None:
    store = ts.KvStore.open(spec_of(location)).result()
    held = json.loads(store[locks.LEASE])
    store[locks.LEASE] = json.dumps(held | {"until": 0.0})


def test_whoever_lost_the_lease_changes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ts.KvStore.open("memory://").result()
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.0)
    with locks.keeping(store, None) as held:
        held()
        with locks.keeping(store, None) as theirs:
            with pytest.raises(locks.PoolBusy):
                held()
            theirs()
        assert store.read(locks.LEASE).result().state == "missing"


class Forgetful:
    """A store that does the next write, and tells that it did not: its answer had been lost."""

    def __init__(self, inner: ts.KvStore):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, key: str, value: bytes | None, **conditions: Any) -> Any:
        self._inner.write(key, value, **conditions).result()
        return self._inner.write(key, value, **conditions)


def test_a_lease_whose_answer_was_lost_is_held() -> None:
    store = ts.KvStore.open("memory://").result()
    with locks.keeping(Forgetful(store), None) as held:  # type: ignore[arg-type]
        held()
        with pytest.raises(locks.PoolBusy), locks.keeping(store, None):
            pass
    assert store.read(locks.LEASE).result().state == "missing"


def test_of_many_that_claim_a_pool_one_has_it(location: str) -> None:
    pools = [Pool.open(location) for _ in range(4)]
    assert pools[0].owner() is None
    found: list[bytes] = []
    claims = [
        threading.Thread(target=lambda p=pool, n=n: found.append(p.claim(b"run %d" % n)))
        for n, pool in enumerate(pools)
    ]
    for claim in claims:
        claim.start()
    for claim in claims:
        claim.join()
    assert len(found) == 4
    assert {*found, pools[0].claim(b"later")} == {pools[1].owner()}
    assert pools[0].items() == ()


def test_a_folder_that_cannot_be_locked_refuses(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(StoreRefused, match="locks/01 cannot be locked"):
        pool.put(1, random_group(1))
