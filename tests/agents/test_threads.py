"""Worlds that compute: beside the event loop, within limits, never too many for nobody."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import pytest
from stand_in_server import calls, completion, replies, says, stand_in

from forge_jax.agents import threads
from forge_jax.agents.limits import WorldLimits
from forge_jax.agents.protocol import Message, Tool
from forge_jax.agents.runner import run_episode
from forge_jax.agents.threads import Threads
from forge_jax.agents.white_box import ToolLoop
from forge_jax.config import UserError
from forge_jax.types import Outcome, Status, Task

TASK = Task(family="hop", seed=5)
HERE: ContextVar[str] = ContextVar("HERE", default="nobody")


class Computing:
    """A world of plain functions, of which one does not end before `let`."""

    messages: tuple[Message, ...] = ({"role": "user", "content": "go"},)
    tools: tuple[Tool, ...] = ()

    def __init__(self, let: threading.Event, where: str):
        self.let, self.where = let, where

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.where == "tool":
            self.let.wait()
        return "done"

    def score(self, answer: str) -> float:
        if self.where == "score":
            self.let.wait()
        if self.where == "exit":
            raise SystemExit
        return next(iter(())) if self.where == "iterator" else 1.0


@pytest.fixture
def let() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def play(world: Computing, limits: WorldLimits, episodes: int = 1) -> list[Outcome]:
    async def one() -> Outcome:
        answer, _ = replies(completion(calls("act", "{}")), completion(says("done")))
        async with stand_in(answer) as client:
            agent = ToolLoop(start=lambda _: world, max_turns=3, max_tokens=4)
            return await run_episode(agent, TASK, client, "m", 20.0, limits)

    async def run() -> list[Outcome]:
        return [await one() for _ in range(episodes)]

    return asyncio.run(run())


@pytest.mark.parametrize("where", ["tool", "score", "exit", "iterator", ""])
def test_what_computes_too_long_is_the_worlds_fault_and_left_behind(
    where: str, let: threading.Event
) -> None:
    limits = WorldLimits(tool=0.2, verify=0.2)
    [outcome] = play(Computing(let, where), limits)
    if not where:
        assert (outcome.status, outcome.reward) == (Status.COMPLETED, 1.0)
        return
    assert outcome.status is Status.ENVIRONMENT_FAILED
    hangs = where in ("tool", "score")
    said = {"exit": "SystemExit", "iterator": "StopIteration"}.get(where, "no end after 0.2 s")
    assert said in (outcome.error or "")
    assert limits.threads.left == hangs


def test_too_many_that_do_not_end_end_the_run(
    let: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MOST_LEFT", 2)
    limits = WorldLimits(tool=0.05)
    assert {one.status for one in play(Computing(let, "tool"), limits, 2)} == {
        Status.ENVIRONMENT_FAILED
    }
    with pytest.raises(UserError, match="3 calls of tools or verifiers go on in threads"):
        play(Computing(let, "tool"), limits)
    let.set()
    for thread in threading.enumerate():
        if thread.name == "world":
            thread.join()
    [after] = play(Computing(let, "tool"), limits)
    assert after.status is Status.COMPLETED, "those that have ended hold nobody up"
    assert limits.threads.left == 3


def test_calls_hold_up_neither_the_loop_nor_each_other(let: threading.Event) -> None:
    """More of them at once than any pool of threads has."""

    async def waits(value: int) -> int:
        return value

    async def test() -> None:
        one, started = Threads(), []
        HERE.set("the caller")

        def hang(number: int) -> tuple[int, str]:
            started.append(number)
            let.wait()
            return number, HERE.get()

        calls = [asyncio.create_task(one.call(hang, number)) for number in range(64)]
        async with asyncio.timeout(20):
            while len(started) < 64:
                await asyncio.sleep(0)
            assert await one.call(lambda: 7) == 7
            assert await one.call(waits, 8) == await one.call(lambda: waits(8)) == 8
            let.set()
            assert await asyncio.gather(*calls) == [(n, "the caller") for n in range(64)]
        with pytest.raises(ZeroDivisionError):
            await one.call(lambda: 1 / 0)
        assert one.left == 0

    asyncio.run(test())
