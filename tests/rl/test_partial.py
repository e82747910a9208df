"""A group that does without its slowest: one outcome each, and never with less than the minimum."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from openai import AsyncOpenAI
from test_player import CHAT, Recording

from forge_jax.gateway.gateway import Gateway
from forge_jax.rl.credit import LeftOut, group_samples, left_out
from forge_jax.rl.partial import GroupDeadline
from forge_jax.rl.play import Player
from forge_jax.types import Outcome, Status, Task

TASK = Task(family="hop", seed=1)
SOON = 0.05


class Agents:
    """The i-th run makes one call, then waits for the seconds it is given; None: for ever."""

    def __init__(self, seconds: Sequence[float | None], fails: Sequence[int] = ()):
        self.seconds, self.fails = seconds, fails
        self.started = 0
        self.cancelled: list[int] = []

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        number, self.started = self.started, self.started + 1
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "?"}], max_tokens=4
        )
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


def statuses(agents: Agents, deadline: GroupDeadline | None, seconds: float = 20.0) -> list[Status]:
    """What became of each episode, in the order of their replicas."""

    async def play() -> list[Status]:
        async with Played(agents, seconds) as player, asyncio.timeout(20):
            group = await player.group(7, TASK, len(agents.seconds), deadline)
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


def test_the_slowest_expire_once_enough_have_completed() -> None:
    agents = Agents((0.0, None, 0.0, None, 0.0))
    found = statuses(agents, GroupDeadline(seconds=SOON, least=3))
    assert sorted(found) == [Status.COMPLETED] * 3 + [Status.EXPIRED] * 2
    assert sorted(agents.cancelled) == [1, 3]


def test_past_the_deadline_a_group_waits_for_its_minimum() -> None:
    """Failed episodes are none of it: a baseline needs completed ones."""
    agents = Agents((0.0, 0.0, 3 * SOON, None), fails=(1,))
    found = statuses(agents, GroupDeadline(seconds=SOON, least=2))
    wanted = [Status.COMPLETED] * 2 + [Status.AGENT_FAILED, Status.EXPIRED]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("deadline", [None, GroupDeadline(seconds=15.0, least=2)])
def test_a_group_that_ends_before_its_deadline_is_whole(deadline: GroupDeadline | None) -> None:
    agents = Agents((0.0, SOON, 0.0))
    assert statuses(agents, deadline) == [Status.COMPLETED] * 3
    assert agents.cancelled == []


def test_without_its_minimum_a_group_ends_as_its_episodes_do() -> None:
    found = statuses(Agents((0.0, None, None)), GroupDeadline(seconds=SOON, least=2), 4 * SOON)
    assert sorted(found) == [Status.COMPLETED, Status.TIMED_OUT, Status.TIMED_OUT]


def test_a_group_given_up_by_the_queue_has_no_outcome() -> None:
    agents = Agents((None, None))

    async def play() -> None:
        async with Played(agents) as player:
            run = asyncio.ensure_future(
                player.group(7, TASK, 2, GroupDeadline(seconds=SOON, least=2))
            )
            await asyncio.sleep(2 * SOON)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run

    asyncio.run(play())
    assert sorted(agents.cancelled) == [0, 1]
