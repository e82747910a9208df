"""What a policy gives up is cancelled or left unread, counted once, and its place filled again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_collect import group

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.config import SchedConfig
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.rl.queueing import new_policy
from forge_jax.sched.answers import StoreUnavailable
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import Why
from forge_jax.sched.pool import Pool
from forge_jax.types import Task

POLICIES = (
    {"policy": "fifo"},
    {"policy": "greedy"},
    {"policy": "greedy_drop", "drop_updates": 0},
    {"policy": "versions", "versions": 1},
    {"policy": "stream", "buffer": 2},
)


class Players:
    """End after a seeded number of turns of the event loop; some numbers never do."""

    def __init__(self, seed: int = 0, hang: tuple[int, ...] = ()):
        self.rng, self.hang = np.random.default_rng(seed), hang
        self.played: list[int] = []
        self.cancelled: list[int] = []

    async def play(self, number: int, task: Task) -> Group:
        self.played.append(number)
        try:
            if number in self.hang:
                await asyncio.Event().wait()
            for _ in range(int(self.rng.integers(1, 30))):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return group(number, task)


def collector(folder: Path, players: Players, **sched: object) -> Collector:
    policy = new_policy(SchedConfig(batch=3, in_flight=6, **sched))
    return Collector(
        lanes=Lanes([LaneConfig(name="hop", policy=policy)], batch=3),
        pool=Pool.open(str(folder)),
        sources=[DomainTasks("hop", seed=0)],
        play=players.play,
        patience=60.0,
    )


async def taken(
    one: Collector, updates: int, between: Callable[[int], bool] = lambda _: True
) -> list[Taken]:
    """What is consumed; after each batch the event loop turns until `between` of its number."""
    found: list[Taken] = []
    async with asyncio.timeout(20), asyncio.TaskGroup() as workers:
        for step in range(updates):
            one.fill(workers)
            found += await one.take(workers)
            while not between(step):
                await asyncio.sleep(0)
            one.updated()
        one.cancel()
    return found


@pytest.mark.parametrize("sched", POLICIES, ids=lambda s: s["policy"])
def test_every_number_ends_once(tmp_path: Path, sched: dict[str, object]) -> None:
    players = Players(seed=1)
    one = collector(tmp_path, players, **sched)
    found = asyncio.run(taken(one, 8))
    queue = one.lanes.queues[0]
    consumed = [item.number for item in found]
    assert len(consumed) == len(set(consumed)) == 24
    assert queue.admitted == 24 + sum(one.given_up().values()) + len(one.state()["tasks"])
    assert len(players.played) == len(set(players.played)), "a number is played twice"
    if queue.bounds is not None:
        assert max(item.lag for item in found) <= queue.bounds.items
        assert max(item.updates for item in found) <= queue.bounds.updates
    if queue.policy.holds:
        assert queue.in_service + queue.waiting == 6, "a place was not filled again"


def test_what_grows_old_is_dropped_and_cancelled(tmp_path: Path) -> None:
    players = Players(hang=(0, 1))
    one = collector(tmp_path, players, policy="greedy_drop", drop_updates=1)
    found = asyncio.run(taken(one, 6))
    assert {0, 1} & {item.number for item in found} == set()
    assert players.cancelled[:2] == [0, 1]
    assert one.given_up()[Why.DROPPED] >= 2
    assert max(item.updates for item in found) <= 1


def test_what_is_old_is_not_trained_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is finished, and grows old, while one group waits for its store."""
    one = collector(tmp_path, Players(), policy="greedy_drop", drop_updates=0)
    put, stuck = one._pool.put, [4]

    def away_for_one(item: int, episodes: Group) -> bool:
        if item in stuck:
            raise StoreUnavailable("away")
        return put(item, episodes)

    monkeypatch.setattr(one._pool, "put", away_for_one)

    def waits(step: int) -> bool:
        return step > 0 or (one.counts["pool_retries"] > 0 and one.lanes.queues[0].waiting >= 4)

    found = asyncio.run(taken(one, 3, waits))
    assert {item.updates for item in found} == {0}
    assert one.given_up()[Why.DROPPED] >= 5


def test_a_stream_goes_on_while_nobody_takes(tmp_path: Path) -> None:
    players = Players()
    one = collector(tmp_path, players, policy="stream", buffer=2)

    def many(step: int) -> bool:
        assert one.lanes.queues[0].waiting <= 2
        return one.given_up()[Why.DROPPED] >= 10 * (step + 1)

    found = asyncio.run(taken(one, 2, many))
    assert len(found) == 6
    kept = Pool.open(str(tmp_path)).items()
    assert {item.number for item in found} < set(kept)
    assert one.lanes.queues[0].in_service == 6
