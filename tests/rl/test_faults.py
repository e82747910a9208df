"""Faults of agents and worlds are counted outcomes; the run goes on and trains on the rest.

A whole run, in process: the real engine, gateway, pool and trainer; only the agent is made
to fail.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from small_run import config

from experiments.models import resolve
from forge_jax.agents import families
from forge_jax.agents.faults import EnvironmentFault
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.tasks import hop
from forge_jax.gateway.server import NAME
from forge_jax.rl import play
from forge_jax.rl.report import read_rows
from forge_jax.rl.run import train
from forge_jax.rollout.runner import Runner
from forge_jax.sched.pool import Pool
from forge_jax.types import Outcome, Task


class Flaky:
    """Plays hop, except that some runs raise, some hang and some lose their world."""

    def __init__(self, faults: bool):
        self.faults = faults
        self.runs = 0

    def agent(self) -> "Flaky":
        return self

    def play(self, rng: np.random.Generator) -> tuple[ScriptedCall, ...]:
        return hop.play(rng)

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        self.runs += 1
        if self.faults and task.split == "train":
            match self.runs % 5:
                case 0:
                    raise KeyError("a bug of the agent")
                case 1:
                    await asyncio.sleep(3600)
                case 2:
                    raise EnvironmentFault("reset: no such world")
        return await hop.agent().run(task, client, model)


def test_a_run_survives_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", {"hop": Flaky(faults=True)})
    real, broken = play.session_seed, []

    def breaks(seed: int, purpose: str, item: int, replica: int) -> int:
        """A bug of our own, in the first item, and the server of the gateway is lost with it."""
        if (purpose, item) != ("train", 0):
            return real(seed, purpose, item, replica)
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == NAME]
        task.cancel()
        broken.append(item)
        raise KeyError("a bug of our own")

    monkeypatch.setattr(play, "session_seed", breaks)
    summary = train(config(episode_seconds=1.0), resolve("quick"), tmp_path, {})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    assert broken
    assert rows[-1]["items_broken"] == rows[-1]["gateway_restarts"] == 1
    assert summary["episodes"] == 3 * 2 * 5 - 4, "the item that broke is one outcome"
    failed = {k: sum(row["failed"].get(k, 0) for row in rows) for k in rows[0]["failed"]}
    assert set(failed) == {"agent_failed", "timed_out", "environment_failed"}
    pool = Pool.open(str(tmp_path / "pool"))
    consumed = [number for row in rows for number in row["items"]]
    for number in consumed:
        episodes = pool.get(number)
        size = 5 if number else 1
        assert [e.replica for e in episodes] == list(range(size)), "one outcome an episode"
        for episode in episodes:
            assert episode.outcome.valid or episode.outcome.error


def test_a_batch_without_a_valid_token_does_not_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Flaky):
        async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
            raise EnvironmentFault("reset: every world is gone")

    monkeypatch.setattr(families, "FAMILIES", {"hop": Lost(faults=True)})
    summary = train(config(), resolve("quick"), tmp_path, {})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["stepped"] for row in rows] == [False] * 3
    assert summary["tokens_trained"] == 0
    assert summary["reward_last"] is None


def test_a_fault_of_the_engine_ends_the_run_with_that_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Runner, version: int, params: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Runner, "publish", broken)
    with pytest.raises(ExceptionGroup) as caught:
        train(config(), resolve("quick"), tmp_path, {})
    assert caught.group_contains(RuntimeError, match="the device is gone")
