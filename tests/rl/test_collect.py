"""The collector: every item once, nothing lost by a kill, and nothing taken past the window.

The players are fakes that end in a seeded order; window, pool and source are the real ones.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_policy import make_turn

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.agents.sources import TaskSource
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import Window
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Outcome, Status, Task


def group(number: int, task: Task, version: int = 0) -> Group:
    turn = make_turn([number], [1], [version])
    outcome = Outcome(status=Status.COMPLETED, reward=1.0)
    return (Episode(item=number, replica=0, task=task, outcome=outcome, turns=(turn,)),)


class Players:
    """Ends each group after a seeded number of turns of the event loop."""

    def __init__(self, seed: int, version: int = 0):
        self.rng = np.random.default_rng(seed)
        self.version = version
        self.played: list[int] = []

    async def play(self, number: int, task: Task) -> Group:
        self.played.append(number)
        for _ in range(int(self.rng.integers(1, 30))):
            await asyncio.sleep(0)
        return group(number, task, self.version)


def collector(
    folder: Path,
    players: Players,
    n: int = 6,
    w: int | None = 3,
    batch: int = 3,
    exact: bool = False,
) -> Collector:
    lane = LaneConfig(name="hop", policy=Window(in_flight=n, window=w))
    return Collector(
        lanes=Lanes([lane], batch=batch, exact=exact),
        pool=Pool.open(str(folder)),
        sources=[DomainTasks("hop", seed=0)],
        play=players.play,
        patience=60.0,
    )


async def taken(one: Collector, batches: int) -> list[list[Taken]]:
    found = []
    async with asyncio.TaskGroup() as workers:
        one.resume(workers)
        for _ in range(batches):
            one.fill(workers)
            found.append(await one.take(workers))
        one.cancel()
    return found


def numbers(batches: list[list[Taken]]) -> list[int]:
    return [item.number for batch in batches for item in batch]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [0, 3, None])
def test_every_item_is_consumed_once_and_carries_its_own_task(
    tmp_path: Path, seed: int, window: int | None
) -> None:
    found = asyncio.run(taken(collector(tmp_path, Players(seed), w=window, batch=4), 5))
    tasks = TaskSource(("hop",), seed=0, split="train")
    by_number = [next(tasks) for _ in range(100)]
    assert len(set(numbers(found))) == 20
    for batch in found:
        for item in batch:
            assert item.episodes[0].item == item.number
            assert item.episodes[0].task == by_number[item.number]
    if window == 0:
        assert numbers(found) == list(range(20))
    if window is not None:
        lags = [item.lag for batch in found for item in batch]
        assert max(lags) <= 6 + window - 1


def test_exact_lanes_admit_a_batch_only_by_the_next_fill(tmp_path: Path) -> None:
    players = Players(0)
    one = collector(tmp_path, players, n=4, w=0, batch=4, exact=True)

    async def run() -> None:
        async with asyncio.TaskGroup() as workers:
            one.fill(workers)
            await one.take(workers)
            await asyncio.sleep(0.01)
            assert sorted(players.played) == [0, 1, 2, 3]
            one.fill(workers)
            await one.take(workers)
            assert sorted(players.played) == list(range(8))

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_a_resume_consumes_what_the_lost_session_did_not(tmp_path: Path, seed: int) -> None:
    players = Players(seed, version=0)
    first = collector(tmp_path, players)

    async def lost_session() -> tuple[list[list[Taken]], dict[str, Any]]:
        async with asyncio.TaskGroup() as workers:
            first.fill(workers)
            early = [await first.take(workers) for _ in range(2)]
            state = first.state()
            players.version = 1  # the session goes on under weights that are never saved
            for _ in range(3):
                await first.take(workers)
            first.cancel()
        return early, state

    early, state = asyncio.run(lost_session())
    late_players = Players(seed + 200, version=0)
    second = collector(tmp_path, late_players)
    second.restore(state, version=0)
    late = asyncio.run(taken(second, 4))
    history = numbers(early) + numbers(late)
    assert len(set(history)) == len(history) == 18
    assert sorted(history)[:12] == list(range(12))  # nothing is skipped for good
    versions = [int(i.episodes[0].turns[0].versions[0]) for batch in late for i in batch]
    assert set(versions) == {0}, "a group sampled by weights that no longer exist was trained"


def test_groups_that_the_pool_already_holds_are_not_played_again(tmp_path: Path) -> None:
    first = collector(tmp_path, Players(0), n=6, batch=2)
    asyncio.run(taken(first, 1))
    state = first.state()
    held = set(Pool.open(str(tmp_path)).items())
    players = Players(1)
    second = collector(tmp_path, players, n=6, batch=2)
    second.restore(state, version=0)
    asyncio.run(taken(second, 2))
    assert not held & set(players.played)


def test_a_group_lost_by_the_pool_is_played_again(tmp_path: Path) -> None:
    first = collector(tmp_path, Players(0), n=6, w=6, batch=1)

    async def fill_and_take() -> None:
        async with asyncio.TaskGroup() as workers:
            first.fill(workers)
            await first.take(workers)
            # Leaving the block waits for the others: they finish, unconsumed.

    asyncio.run(fill_and_take())
    state = first.state()
    lost = state["lanes"]["queues"]["hop"]["finished"][0][0]
    (tmp_path / "items" / f"{lost:012}").write_bytes(b"not an episode")
    players = Players(1)
    second = collector(tmp_path, players, n=6, w=6, batch=1)
    second.restore(state, version=0)
    # As many as the window lets overtake it.
    found = numbers(asyncio.run(taken(second, 12)))
    assert lost in players.played
    assert lost in found
    assert Pool.open(str(tmp_path)).corrupt() == (lost,)
