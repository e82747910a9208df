"""A group that does without its slowest: one outcome each, and never with less than the minimum."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from openai import AsyncOpenAI
from test_player import CHAT, Recording

from forge_jax.gateway.gateway import Gateway
from forge_jax.rl import play
from forge_jax.rl.credit import LeftOut, group_samples, left_out
from forge_jax.rl.partial import GroupDeadline, expire
from forge_jax.rl.play import Player
from forge_jax.types import Episode, Outcome, Status, Task

TASK = Task(family="hop", seed=1)
SOON = 0.05


class Agents:
    """The i-th run makes one call, then waits for the seconds it is given; None: for ever."""

    def __init__(self, seconds: Sequence[float | None], fails: Sequence[int] = ()):
        self.seconds, self.fails = seconds, fails
        self.started = self.waiting = 0
        self.cancelled: list[int] = []

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        number, self.started = self.started, self.started + 1
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "?"}], max_tokens=4
        )
        self.waiting += 1
        try:
            seconds = self.seconds[number]
            await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if number in self.fails:
            raise RuntimeError("it broke")
        return Outcome(status=Status.COMPLETED, reward=float(number))


class Played(AbstractAsyncContextManager["Player"]):
    """A player of such agents before a scripted engine."""

    def __init__(self, agents: Agents, seconds: float = 20.0):
        self.agents, self.seconds = agents, seconds
        self.gateway = Gateway(Recording(), CHAT, "m", "admin")

    async def __aenter__(self) -> Player:
        self._running = self.gateway.running()
        url = await self._running.__aenter__()
        self.client = AsyncOpenAI(base_url=url, api_key="none")
        return Player(
            agent=self.agents, gateway=self.gateway, url=url, client=self.client, model="m",
            purpose="train", seed=3, temperature=1.0, seconds=self.seconds,
        )  # fmt: skip

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()
        await self._running.__aexit__(*error)


def statuses(
    agents: Agents, deadline: GroupDeadline | None, seconds: float = 20.0
) -> list[Status] | None:
    """What became of each episode, in the order of their replicas; None: the group is given up."""

    async def play() -> list[Status] | None:
        async with Played(agents, seconds) as player, asyncio.timeout(20):
            group = await player.group(7, TASK, len(agents.seconds), deadline)
        if group is None:
            return None
        assert [e.replica for e in group] == list(range(len(agents.seconds)))
        assert all(e.item == 7 and len(e.turns) == 1 for e in group)
        kept = group_samples(group)
        out = left_out(group)
        sampled = sum(len(t.output) for e in group for t in e.turns)
        assert sum(len(turn.output) for _, turn in kept) + sum(out.values()) == sampled
        expired = [e for e in group if e.outcome.status is Status.EXPIRED]
        assert out[LeftOut.EXPIRED] == sum(len(t.output) for e in expired for t in e.turns)
        return [e.outcome.status for e in group]

    return asyncio.run(play())


@pytest.mark.parametrize("hang", [True, False])
@pytest.mark.parametrize("completed", range(4))
def test_past_its_deadline_a_group_is_complete_or_given_up_by_its_minimum(
    completed: int, hang: bool
) -> None:
    """Of five episodes one has failed; those that have not completed run for ever or failed too,
    and a group that has ended is complete, whatever it came to."""

    async def test() -> None:
        async def one(number: int) -> Episode:
            if hang and number >= completed and number != 4:
                await asyncio.Event().wait()
            status = Status.COMPLETED if number < completed else Status.AGENT_FAILED
            return Episode(
                item=7, replica=number, task=TASK, outcome=Outcome(status=status), turns=()
            )

        runs = [asyncio.create_task(one(number)) for number in range(5)]
        limits = [asyncio.timeout(None) for _ in runs]
        for _ in range(3):
            await asyncio.sleep(0)
        async with AsyncExitStack() as stack:
            for limit in limits:
                await stack.enter_async_context(limit)
            enough = await expire(runs, limits, GroupDeadline(seconds=0.01, least=2))
            assert enough == (completed >= 2 or not hang)
            ended = [limit.when() is not None for limit in limits]
            assert ended == [enough and not run.done() for run in runs]
            for limit in limits:
                limit.reschedule(None)
        for run in runs:
            run.cancel()

    asyncio.run(test())


def test_the_slowest_expire_once_enough_have_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(
        runs: Sequence[asyncio.Task[Episode]],
        limits: Sequence[asyncio.Timeout],
        deadline: GroupDeadline,
    ) -> bool:
        while sum(run.done() for run in runs) < 3:
            await asyncio.sleep(0.005)
        return await expire(runs, limits, deadline)

    monkeypatch.setattr(play, "expire", late)
    agents = Agents((0.0, None, 0.0, None, 0.0))
    found = statuses(agents, GroupDeadline(seconds=SOON, least=3))
    assert found is not None
    assert sorted(found) == [Status.COMPLETED] * 3 + [Status.EXPIRED] * 2
    assert sorted(agents.cancelled) == [1, 3]


def test_a_group_without_its_minimum_has_no_outcome() -> None:
    agents = Agents((None, None))
    assert statuses(agents, GroupDeadline(seconds=SOON, least=2)) is None


@pytest.mark.parametrize("deadline", [None, GroupDeadline(seconds=15.0, least=2)])
def test_a_group_that_ends_before_its_deadline_is_whole(deadline: GroupDeadline | None) -> None:
    agents = Agents((0.0, SOON, 0.0))
    assert statuses(agents, deadline) == [Status.COMPLETED] * 3
    assert agents.cancelled == []


def test_a_group_given_up_by_the_queue_has_no_outcome() -> None:
    agents = Agents((None, None))

    async def play() -> None:
        async with Played(agents) as player:
            run = asyncio.ensure_future(
                player.group(7, TASK, 2, GroupDeadline(seconds=15.0, least=2))
            )
            while agents.waiting < 2:
                await asyncio.sleep(SOON)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run

    asyncio.run(play())
    assert sorted(agents.cancelled) == [0, 1]
