"""Exactly one outcome, whatever an agent or its world does."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI
from stand_in_server import calls, completion, replies, says, stand_in

from forge_jax.agents import white_box
from forge_jax.agents.faults import BadCall, EnvironmentFault
from forge_jax.agents.protocol import Message, Tool
from forge_jax.agents.runner import run_episode
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Outcome, Status, Task

TASK = Task(family="hop", seed=0)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="unused", max_retries=0)


@dataclass(frozen=True)
class Doing:
    """An agent that does one thing."""

    act: Callable[[], Awaitable[Any]]

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        return await self.act()


def outcome_of(act: Callable[[], Awaitable[Any]], timeout: float = 5.0) -> Outcome:
    return asyncio.run(run_episode(Doing(act), TASK, CLIENT, "m", timeout))


async def hang() -> None:
    await asyncio.sleep(60)


def test_an_outcome_is_passed_on() -> None:
    made = Outcome(status=Status.COMPLETED, reward=0.5, metrics={"turns": 3.0})

    async def give() -> Outcome:
        return made

    assert outcome_of(give) is made


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), Status.AGENT_FAILED),
        (TimeoutError("its own"), Status.AGENT_FAILED),
        (BadCall("unhandled"), Status.AGENT_FAILED),
        (asyncio.CancelledError(), Status.AGENT_FAILED),
        (ExceptionGroup("several", [ValueError("one")]), Status.AGENT_FAILED),
        (EnvironmentFault("reset: no disk"), Status.ENVIRONMENT_FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_agent_raises_says_whose_fault_it_is(error: BaseException, status: Status) -> None:
    async def fail() -> None:
        raise error

    outcome = outcome_of(fail)
    assert outcome.status is status
    assert str(error) in outcome.error
    assert outcome.error


def test_a_connection_that_fails_is_the_agents_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(white_box, "FIRST_WAIT", 0.001)

    async def run() -> Outcome:
        async with AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="k", max_retries=0) as client:
            loop = ToolLoop(start=lambda task: World(), max_turns=2, max_tokens=4)
            return await run_episode(loop, TASK, client, "m", 5.0)

    outcome = asyncio.run(run())
    assert outcome.status is Status.AGENT_FAILED
    assert "APIConnectionError" in outcome.error


def test_an_agent_that_hangs_is_cancelled() -> None:
    cleaned = []

    async def careful() -> None:
        try:
            await hang()
        finally:
            cleaned.append(True)

    outcome = outcome_of(careful, timeout=0.02)
    assert (outcome.status, cleaned) == (Status.TIMED_OUT, [True])


def test_an_agent_that_fails_while_it_is_cancelled_has_timed_out() -> None:
    async def clumsy() -> None:
        try:
            await hang()
        finally:
            raise RuntimeError("in cleaning up")

    assert outcome_of(clumsy, timeout=0.02).status is Status.TIMED_OUT


def test_an_agent_that_ignores_its_cancellation_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge_jax.agents.runner.GRACE_SECONDS", 0.02)
    ends = []

    async def stubborn() -> None:
        while not ends:
            try:
                await hang()
            except asyncio.CancelledError:
                ends.append(asyncio.create_task(asyncio.sleep(0.1)))
        await ends[0]

    outcome = outcome_of(stubborn, timeout=0.02)
    assert outcome.status is Status.TIMED_OUT
    assert "ignored" in outcome.error


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_never_leaves(reward: float) -> None:
    async def broken() -> Outcome:
        return Outcome(status=Status.COMPLETED, reward=reward)

    outcome = outcome_of(broken)
    assert (outcome.status, outcome.reward) == (Status.ENVIRONMENT_FAILED, 0.0)


def test_an_agent_that_returns_nothing_has_failed() -> None:
    async def nothing() -> None:
        return None

    assert outcome_of(nothing).status is Status.AGENT_FAILED


def test_cancelling_the_run_cancels_the_agent_and_propagates() -> None:
    events = []

    async def careful() -> None:
        try:
            events.append("began")
            await hang()
        finally:
            events.append("ended")

    async def run() -> None:
        running = asyncio.create_task(run_episode(Doing(careful), TASK, CLIENT, "m", 60.0))
        while not events:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert events == ["began", "ended"]  # by now, not only when the loop closes

    asyncio.run(run())


@dataclass(frozen=True)
class World:
    """An environment that breaks where it is told to."""

    broken: str = ""

    def breaks(self, where: str) -> None:
        if self.broken == where:
            raise OSError(f"no {where}")

    @property
    def messages(self) -> tuple[Message, ...]:
        self.breaks("messages")
        return ({"role": "user", "content": "go"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ({"type": "function", "function": {"name": "act", "parameters": {}}},)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.breaks("call")
        return "done"

    async def score(self, answer: str) -> float:
        self.breaks("score")
        return 1.0


@pytest.mark.parametrize("where", ["start", "messages", "call", "score", ""])
def test_a_broken_world_is_not_the_policys_fault(where: str) -> None:
    def start(task: Task) -> World:
        World(where).breaks("start")
        return World(where)

    async def run() -> Outcome:
        answer, _ = replies(completion(calls("act", "{}")), completion(says("done")))
        async with stand_in(answer) as client:
            loop = ToolLoop(start=start, max_turns=3, max_tokens=4)
            return await run_episode(loop, TASK, client, "m", 20.0)

    outcome = asyncio.run(run())
    if where:
        assert outcome.status is Status.ENVIRONMENT_FAILED
        assert f"no {where}" in outcome.error
    else:
        assert (outcome.status, outcome.reward) == (Status.COMPLETED, 1.0)
