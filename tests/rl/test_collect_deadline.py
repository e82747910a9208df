"""A head that hangs costs its deadline once, not the run; and it is counted."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_policy import make_turn

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.config import SchedConfig
from forge_jax.rl import durable
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.rl.queueing import new_deadline, new_policy
from forge_jax.sched.answers import StoreUnavailable
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import Why
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Outcome, Status, Task

SECONDS = 0.1


class Players:
    """Play at once, but tasks that come as the `hangs` first plays, which never end, those of the
    numbers `slow`, whose own time is over, and those of `breaks`, in which our own code fails."""

    def __init__(self, hangs: int, slow: Sequence[int] = (), breaks: Sequence[int] = ()):
        self.left, self.slow, self.breaks = hangs, slow, breaks
        self.played: list[tuple[int, Task]] = []
        self.cancelled: list[int] = []

    async def play(self, number: int, task: Task) -> Group | None:
        self.played.append((number, task))
        if number in self.slow:
            return None
        if number in self.breaks:
            raise ExceptionGroup("of a group", [KeyError("a bug")])
        try:
            if self.left:
                self.left -= 1
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        outcome = Outcome(status=Status.COMPLETED, reward=1.0)
        turns = (make_turn([number], [1], [0]),)
        return (Episode(item=number, replica=0, task=task, outcome=outcome, turns=turns),)


def collector(
    folder: Path, players: Players, sched: SchedConfig, most_broken: int = 10
) -> Collector:
    lane = LaneConfig(name="hop", policy=new_policy(sched), deadline=new_deadline(sched))
    return Collector(
        lanes=Lanes([lane], batch=sched.batch, exact=sched.synchronous),
        pool=Pool.open(str(folder)),
        sources=[DomainTasks("hop", seed=0)],
        play=players.play,
        patience=60.0,
        most_broken=most_broken,
    )


async def taken(one: Collector, batches: int, players: Players | None = None) -> list[Taken]:
    """What is consumed; by the end of the first batch `players` have ended what hung."""
    found: list[Taken] = []
    async with asyncio.timeout(20), asyncio.TaskGroup() as workers:
        one.resume(workers)
        for _ in range(batches):
            one.fill(workers)
            found += await one.take(workers)
            if players is not None:
                assert players.cancelled == [0, 1]
                players = None
        one.cancel()
    return found


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_head_that_hangs_expires(tmp_path: Path, synchronous: bool) -> None:
    places = 4 if synchronous else 6
    sched = SchedConfig(
        batch=4, in_flight=places, window=2, head_seconds=SECONDS, synchronous=synchronous
    )
    players = Players(hangs=2)
    one = collector(tmp_path, players, sched)
    found = asyncio.run(taken(one, 3, players))
    numbers = {item.number for item in found}
    last = 14 if synchronous else 14 + 2  # the window lets so many overtake
    assert numbers <= set(range(2, last)), "0 and 1 are nobody's"
    assert len(numbers) == len(found) == 12
    assert one.given_up() == {Why.EXPIRED: 2, Why.REQUEUED: 0, Why.DROPPED: 0}
    assert not {0, 1} & set(Pool.open(str(tmp_path)).items())


def test_a_head_that_hangs_once_is_played_again_as_another(tmp_path: Path) -> None:
    sched = SchedConfig(batch=1, in_flight=3, window=1, head_seconds=SECONDS, requeue=True)
    players = Players(hangs=1)
    one = collector(tmp_path, players, sched)
    found = asyncio.run(taken(one, 8))
    [again] = [n for n, task in players.played[1:] if task == players.played[0][1]]
    assert 0 not in {item.number for item in found}
    assert again in {item.number for item in found}
    assert one.given_up() == {Why.EXPIRED: 0, Why.REQUEUED: 1, Why.DROPPED: 0}


def test_a_task_that_hangs_again_expires_and_a_resume_knows_what_is_gone(tmp_path: Path) -> None:
    sched = SchedConfig(batch=1, in_flight=1, window=0, head_seconds=SECONDS, requeue=True)
    one = collector(tmp_path, Players(hangs=2), sched)
    found = asyncio.run(taken(one, 1))
    assert [item.number for item in found] == [2]
    assert one.given_up() == {Why.EXPIRED: 1, Why.REQUEUED: 1, Why.DROPPED: 0}
    other = collector(tmp_path, Players(hangs=0), sched)
    other.restore(one.state(), version=0)
    assert other.given_up() == one.given_up()
    assert [item.number for item in asyncio.run(taken(other, 2))] == [3, 4]


def test_no_deadline_ends_a_group_that_waits_for_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "FIRST_WAIT", 3 * SECONDS)
    one = collector(
        tmp_path, Players(hangs=0), SchedConfig(batch=1, window=0, head_seconds=SECONDS)
    )
    put, tries = one._pool.put, [StoreUnavailable("away")]

    def troubled(item: int, episodes: Group) -> bool:
        if tries:
            raise tries.pop()
        return put(item, episodes)

    monkeypatch.setattr(one._pool, "put", troubled)
    found = asyncio.run(taken(one, 2))
    assert len(found) == 2
    assert sum(one.given_up().values()) == 0
    assert one.counts["pool_retries"] == 1


def test_a_number_that_the_lost_session_gave_to_another_task_is_played_for_its_own(
    tmp_path: Path,
) -> None:
    sched = SchedConfig(batch=1, in_flight=2, window=1, head_seconds=SECONDS, requeue=True)
    first = collector(tmp_path, Players(hangs=1), sched)

    async def lost() -> dict[str, Any]:
        async with asyncio.timeout(20), asyncio.TaskGroup() as workers:
            first.fill(workers)
            state = first.state()  # 0 and 1 are admitted; then 0 hangs, and comes again as another
            for _ in range(3):
                await first.take(workers)
            first.cancel()
        return state

    state = asyncio.run(lost())
    players = Players(hangs=0)
    patient = SchedConfig(batch=1, in_flight=2, window=1)
    second = collector(tmp_path, players, patient)
    second.restore(state, version=0)
    found = asyncio.run(taken(second, 4))
    source = DomainTasks("hop", seed=0)
    tasks = [next(source) for _ in range(10)]
    assert [item.episodes[0].task for item in found] == [tasks[item.number] for item in found]


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_group_whose_own_time_is_over_is_given_up_or_comes_again(
    tmp_path: Path, synchronous: bool, requeue: bool
) -> None:
    sched = SchedConfig(
        batch=4, window=2, group_seconds=1.0, group_least=2, requeue=requeue,
        synchronous=synchronous,
    )  # fmt: skip
    players = Players(hangs=0, slow=(1, 2))
    one = collector(tmp_path, players, sched)
    found = asyncio.run(taken(one, 3))
    numbers = [item.number for item in found]
    assert len(set(numbers)) == len(numbers) == 12
    assert not {1, 2} & set(numbers)
    why, other = (Why.REQUEUED, Why.EXPIRED) if requeue else (Why.EXPIRED, Why.REQUEUED)
    assert one.given_up() == {why: 2, other: 0, Why.DROPPED: 0}
    played = [task for _, task in players.played]
    again = [task for number, task in players.played if number in (1, 2)]
    assert [played.count(task) for task in again] == [2 if requeue else 1] * 2


def test_an_item_that_our_own_code_broke_is_one_outcome_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = collector(tmp_path, Players(hangs=0, breaks=(1, 2, 4, 5)), SchedConfig(batch=4), 5)
    found = asyncio.run(taken(one, 2))
    [episode] = next(item.episodes for item in found if item.number == 2)
    assert episode.outcome.status is Status.ENVIRONMENT_FAILED
    assert "KeyError: 'a bug'" in (episode.outcome.error or "")
    assert one.counts["items_broken"] == 4
    told = [record for record in caplog.records if "item 2 was broken" in record.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info


def test_our_own_fault_that_stays_ends_the_run(tmp_path: Path) -> None:
    sched = SchedConfig(batch=4, in_flight=4)
    one = collector(tmp_path, Players(hangs=0, breaks=range(100)), sched, 3)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(taken(one, 2))
    assert caught.group_contains(RuntimeError, match=r"protect.most_broken=3 items in a row.*a bug")
