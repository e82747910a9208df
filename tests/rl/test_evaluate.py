"""Evaluation counts environment faults apart, and its tasks are fixed by their seed."""

import asyncio

import numpy as np
import pytest

from forge_jax.rl.evaluate import NothingPlayed, bootstrap, held_out, played, summarise
from forge_jax.types import Episode, Outcome, Status, Task


def result(number: int, task: Task) -> Episode:
    status = Status.ENVIRONMENT_FAILED if number % 4 == 3 else Status.COMPLETED
    outcome = Outcome(status=status, reward=float(number % 4 == 0))
    return Episode(item=number, replica=0, task=task, outcome=outcome, turns=())


def test_rates_leave_environment_faults_out() -> None:
    running = most = 0

    async def play(number: int, task: Task) -> Episode:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return result(number, task)

    found = summarise(asyncio.run(played(held_out("hop", 16, 0), play, concurrency=3)))
    assert found.episodes == 16
    assert found.failures == 4
    assert found.success == pytest.approx(4 / 12)
    assert most == 3


def test_agents_that_all_fail_say_nothing_about_the_policy() -> None:
    async def play(number: int, task: Task) -> Episode:
        outcome = Outcome(status=Status.AGENT_FAILED, error=f"a bug in run {number}")
        return Episode(item=number, replica=0, task=task, outcome=outcome, turns=())

    with pytest.raises(NothingPlayed, match="a bug in run 0"):
        asyncio.run(played(held_out("hop", 4, 0), play, concurrency=2))


def test_held_out_tasks_repeat_and_differ_by_seed() -> None:
    assert held_out("hop", 8, 1) == held_out("hop", 8, 1)
    seeds = {t.seed for s in range(3) for t in held_out("hop", 256, s)}
    assert len(seeds) == 3 * 256
    assert {t.split for t in held_out("hop", 8, 1)} == {"eval"}


def test_bootstrap_covers_the_mean_and_narrows() -> None:
    few = np.array([0.0, 1.0] * 10)
    many = np.array([0.0, 1.0] * 1000)
    for values in (few, many):
        low, high = bootstrap(values)
        assert low < 0.5 < high
    assert np.ptp(bootstrap(many)) < np.ptp(bootstrap(few))
    assert bootstrap(np.ones(5)) == (1.0, 1.0)
    assert bootstrap(np.zeros(0)) == (0.0, 0.0)
