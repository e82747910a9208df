"""A verifier that sleeps, spins or dies costs its own episode, and nothing of it is left."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from stand_in_server import calls, completion, replies, says, stand_in
from verifier_functions import crashes, parent_of, raises, right, sleeps, spins

from forge_jax.agents.faults import EnvironmentFault
from forge_jax.agents.limits import WorldLimits
from forge_jax.agents.runner import run_episode
from forge_jax.agents.verifiers import Verifiers
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Status, Task

TASK = Task(family="hop", seed=1)


BROKEN = {
    sleeps: "score: no end after 0.3 s",
    spins: "score: no end after 0.3 s",
    crashes: "score: the verifier died",
    raises: "score: ValueError: no such answer",
}


def gone(pid: int) -> bool:
    """Whether nothing is left of a process and its group."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_broken_verifier_costs_nobody_else(tmp_path: Path) -> None:
    async def test() -> list[float | BaseException]:
        verifiers = Verifiers()
        assert await verifiers.call(right, "no", seconds=30) == 0.0
        broken = [
            verifiers.call(score, str(tmp_path / score.__name__), seconds=0.3) for score in BROKEN
        ]
        sound = [verifiers.call(right, "yes", seconds=30) for _ in range(4)]
        return await asyncio.gather(*broken, *sound, return_exceptions=True)

    *found, a, b, c, d = asyncio.run(test())
    assert (a, b, c, d) == (1.0, 1.0, 1.0, 1.0)
    for error, (score, text) in zip(found, BROKEN.items(), strict=True):
        assert isinstance(error, EnvironmentFault)
        assert text in str(error)
        pid = int((tmp_path / score.__name__).read_text())
        deadline = time.monotonic() + 20
        while not gone(pid):
            assert time.monotonic() < deadline, score
            time.sleep(0.01)


def test_the_process_to_fork_from_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> float:
        verifiers = Verifiers()
        parent = int(await verifiers.call(parent_of, seconds=30))
        os.kill(parent, signal.SIGKILL)
        return await verifiers.call(right, "yes", seconds=30)

    assert asyncio.run(test()) == 1.0
    assert any("is started again" in text for text in caplog.messages)


def test_what_goes_to_no_other_process_is_the_worlds_fault() -> None:
    with pytest.raises(EnvironmentFault, match="goes to no other process"):
        asyncio.run(Verifiers().call(lambda: 1.0, seconds=1))


class Slow:
    """A world that never returns from one of its coroutines."""

    messages = ({"role": "user", "content": "go"},)
    tools = ({"type": "function", "function": {"name": "act", "parameters": {}}},)

    def __init__(self, where: str):
        self.where = where

    async def call(self, name: str, arguments: object) -> str:
        await asyncio.sleep(3600 if self.where == "tool" else 0)
        return "done"

    async def score(self, answer: str) -> float:
        await asyncio.sleep(3600 if self.where == "score" else 0)
        return 1.0


@pytest.mark.parametrize("where", ["tool", "score", ""])
def test_a_world_that_never_returns_is_not_the_policys_fault(where: str) -> None:
    async def test() -> tuple[Status, str | None]:
        loop = ToolLoop(start=lambda _: Slow(where), max_turns=3, max_tokens=4)
        answer, _ = replies(completion(calls("act", "{}")), completion(says("done")))
        async with stand_in(answer) as client:
            return await outcome(loop, client)

    async def outcome(loop: ToolLoop, client: AsyncOpenAI) -> tuple[Status, str | None]:
        limits = WorldLimits(tool=0.2, verify=0.2)
        found = await run_episode(loop, TASK, client, "m", 60.0, limits)
        return found.status, found.error

    status, error = asyncio.run(test())
    if where:
        named = {"tool": "tool act", "score": "score"}[where]
        assert (status, error) == (Status.ENVIRONMENT_FAILED, f"{named}: no end after 0.2 s")
    else:
        assert status is Status.COMPLETED
