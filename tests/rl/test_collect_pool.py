"""A pool that is slow or away: nothing is lost, and no more is admitted than the window allows."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from test_collect import group

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.config import UserError
from forge_jax.rl import durable
from forge_jax.rl.collect import Collector, Group
from forge_jax.sched.answers import StoreUnavailable
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import Window
from forge_jax.sched.pool import Pool
from forge_jax.types import Task

N, W = 4, 2
AWAY = "ABORTED: All 2 retry attempts failed"


class Flaky:
    """A store in memory of which every write of an item is slow, or fails so many times."""

    def __init__(self, slow: float = 0.0, failures: int = 0, fault: str = AWAY):
        self._inner = ts.KvStore.open("memory://").result()
        self.slow, self.failures, self._fault = slow, failures, ValueError(fault)
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, key: str, value: bytes | None, **conditions: Any) -> Any:
        time.sleep(self.slow)
        if self.failures:
            self.failures -= 1
            return _failed(self._fault)
        self.written += 1
        return self._inner.write(key, value, **conditions)


def _failed(fault: Exception) -> Any:
    promise, future = ts.Promise.new()
    promise.set_exception(fault)
    return future


async def consumed(store: Flaky, patience: float, items: int) -> tuple[list[int], int, Collector]:
    """Numbers consumed, and how many groups were ever played and not yet in the store."""
    played, most = 0, 0

    async def play(number: int, task: Task) -> Group:
        nonlocal played, most
        await asyncio.sleep(0)
        played += 1
        most = max(most, played - store.written)
        return group(number, task)

    lane = LaneConfig(name="hop", policy=Window(in_flight=N, window=W))
    one = Collector(
        lanes=Lanes([lane], batch=items),
        pool=Pool(store),  # type: ignore[arg-type]
        sources=[DomainTasks("hop", seed=0)],
        play=play,
        patience=patience,
    )
    async with asyncio.TaskGroup() as workers:
        one.fill(workers)
        taken = await one.take(workers)
        one.cancel()
    return [item.number for item in taken if item.episodes], most, one


@pytest.mark.parametrize("trouble", [{"slow": 0.01}, {"failures": 17}])
def test_a_slow_or_failing_pool_stops_admissions(
    monkeypatch: pytest.MonkeyPatch, trouble: dict[str, Any]
) -> None:
    monkeypatch.setattr(durable, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(durable, "LONGEST_WAIT", 0.02)
    numbers, most, one = asyncio.run(consumed(Flaky(**trouble), patience=60.0, items=12))
    assert len(set(numbers)) == len(numbers) == 12, "an item was lost or came twice"
    assert set(range(12 - W)) <= set(numbers)
    assert most <= N, "more groups were held than there are places"
    assert one.counts["pool_retries"] == trouble.get("failures", 0)


def test_a_pool_that_stays_away_ends_the_run_with_that_fault(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(consumed(Flaky(failures=10**6), patience=0.3, items=1))
    assert caught.group_contains(StoreUnavailable, match="ABORTED")


@pytest.mark.parametrize(
    "fault",
    [
        "PERMISSION_DENIED: AccessDenied: no",
        "NOT_FOUND: NoSuchBucket: no",
        "ExpiredToken: no [http_response_code='400']",
        "FAILED_PRECONDITION: Failed to open directory: Not a directory",
    ],
)
def test_a_pool_that_refuses_ends_the_run_at_once(fault: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(consumed(Flaky(failures=10**6, fault=fault), patience=1e9, items=1))
    named = re.escape(f'pool={{"driver": "memory"}}: the store refuses: {fault}')
    assert caught.group_contains(UserError, match=named)
