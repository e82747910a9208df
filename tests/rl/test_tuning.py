"""A run's windows follow what its items take, with reasons, within the budget, across a resume."""

import asyncio
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_policy import make_turn

from forge_jax.config import DomainConfig, SchedConfig, TrainConfig, TuningConfig, UserError
from forge_jax.rl.collect import Collector
from forge_jax.rl.mixture import lag_bound, lanes_of, sources_of, tunings_of
from forge_jax.rl.queueing import new_policy, new_tuning
from forge_jax.rl.tuning import Tuning, retune
from forge_jax.sched.policies import Window
from forge_jax.sched.pool import Pool
from forge_jax.sched.queue import Queue
from forge_jax.types import Episode, Outcome, Status, Task

TUNE = TuningConfig(lag_updates=12, every=4, skew=0.6, least=20, horizon=20)
SCHED = SchedConfig(batch=4, in_flight=4, window=0, tune=TUNE)


def run(sched: SchedConfig) -> TrainConfig:
    return TrainConfig(model="quick", task="hop", steps=3, sched=sched)


def group(seconds: float, gap: float = 0.0) -> tuple[Episode, ...]:
    """Two episodes of two calls; the second takes `seconds` of calls around a tool's `gap`."""

    def episode(replica: int, seconds: float) -> Episode:
        half = dataclasses.replace(make_turn([1], [1], [0]), seconds=seconds / 2)
        later = dataclasses.replace(half, start=seconds / 2 + gap)
        outcome = Outcome(status=Status.COMPLETED)
        task = Task(family="hop", seed=1)
        return Episode(item=0, replica=replica, task=task, outcome=outcome, turns=(half, later))

    return episode(0, seconds / 3), episode(1, seconds)


def tuned(sched: SchedConfig) -> tuple[Queue, Tuning]:
    queue = Queue(new_policy(sched), batch=sched.batch)
    one = new_tuning(sched, queue)
    assert one is not None
    return queue, one


def heavy(one: Tuning, count: int = 100) -> None:
    for seconds in np.random.default_rng(0).lognormal(-0.5, 1.0, count):
        one.ended(group(float(seconds)))


def test_heavy_latencies_widen_the_window_and_the_row_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, one = tuned(SCHED)
    heavy(one)
    with caplog.at_level(logging.INFO):
        rows = [asyncio.run(one.updated(0.2)) for _ in range(4)]
    assert rows[:3] == [{"in_flight": 4, "window": 0}] * 3
    assert rows[3]["window"] > 0
    assert any("picked: N=" in reason for reason in rows[3]["tuned"])
    assert "picked: N=" in caplog.text
    assert queue.policy == Window(in_flight=rows[3]["in_flight"], window=rows[3]["window"])
    assert queue.bounds is not None
    assert queue.bounds.updates <= TUNE.lag_updates
    assert queue.lag_bound <= lag_bound(run(SCHED)) == 12 * 4 - 1


def test_time_between_calls_is_the_tools() -> None:
    _, one = tuned(SCHED)
    one.ended(group(2.0, gap=5.0))
    one.ended(())
    assert one.state()["tuner"]["measured"] == [[2.0, 5.0, 4.0]], "of the slowest, all tokens"


def test_a_resumed_run_has_the_window_it_had_and_picks_the_same() -> None:
    queue, one = tuned(SCHED)
    heavy(one)
    for _ in range(4):
        asyncio.run(one.updated(0.2))
    while queue.admit() is not None:
        pass
    state = json.loads(json.dumps([one.state(), queue.state()]))
    other_queue, other = tuned(SCHED)
    with pytest.raises(UserError, match="this queue has"):
        other_queue.restore(state[1])  # it was another window's
    other.restore(state[0])
    other_queue.restore(state[1])
    assert [other.state(), other_queue.state()] == state
    rows = [[asyncio.run(t.updated(0.9)) for _ in range(4)] for t in (one, other)]
    assert rows[0] == rows[1]
    assert "tuned" in rows[0][-1]
    with pytest.raises(UserError, match="saved tuning"):
        other.restore({"tuner": {}})


def test_nothing_tunes_unless_it_is_asked_to() -> None:
    plain = run(dataclasses.replace(SCHED, tune=None))
    assert tunings_of(plain, lanes_of(plain)) == []
    assert asyncio.run(retune([], ["hop"], 0.2)) == {}
    assert lag_bound(plain) == 3


async def consumed(one: Collector, updates: int) -> list[dict[str, Any]]:
    """The rows of so many updates."""
    rows = []
    async with asyncio.timeout(20), asyncio.TaskGroup() as workers:
        one.resume(workers)
        for _ in range(updates):
            one.fill(workers)
            await one.take(workers)
            one.updated()
            rows.append(await retune(one.tunings, one.lanes.names, 0.2))
        one.cancel()
    return rows


def test_each_domain_has_a_tuner_that_measures_its_own(tmp_path: Path) -> None:
    domains = {"light": DomainConfig(family="hop"), "heavy": DomainConfig(family="hop")}
    wide = run(dataclasses.replace(SCHED, batch=8, in_flight=8))
    cfg = dataclasses.replace(wide, task=None, domains=domains)

    async def play(number: int, task: Task) -> tuple[Episode, ...]:
        seconds = 10.0 if number % 8 == 1 else 1.0  # numbers of `heavy` are odd
        return tuple(dataclasses.replace(e, item=number) for e in group(seconds))

    def collector() -> Collector:
        lanes = lanes_of(cfg)
        return Collector(
            lanes=lanes, pool=Pool.open(str(tmp_path)), sources=sources_of(cfg), play=play,
            patience=60.0, tunings=tunings_of(cfg, lanes),
        )  # fmt: skip

    one = collector()
    rows = asyncio.run(consumed(one, 8))
    assert rows[-1]["window_light"] == 0
    measured = [{row[0] for row in t.state()["tuner"]["measured"]} for t in one.tunings]
    assert measured == [{1.0}, {1.0, 10.0}]
    assert ["tuned_heavy" in row for row in rows[-2:]] == [False, True]
    other = collector()
    other.restore(json.loads(json.dumps(one.state())), version=8)
    assert [q.policy for q in other.lanes.queues] == [q.policy for q in one.lanes.queues]
    assert [t.state()["sizes"] for t in other.tunings] == [t.state()["sizes"] for t in one.tunings]
