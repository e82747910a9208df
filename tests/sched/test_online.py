"""Windows that change while a queue runs: bounds between two of them, and what a tuner does."""

import json
import random

import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.sched.fleet import play
from forge_jax.sched.instances import FleetConfig
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.latency import Items, Light, LogNormal
from forge_jax.sched.online import OnlineConfig, Tuner
from forge_jax.sched.played import TrainerConfig
from forge_jax.sched.policies import Window, greedy
from forge_jax.sched.queue import Queue
from forge_jax.sched.tuner import TuneConfig

TUNE = TuneConfig(updates=12, skew=0.6, horizon=30, steps=4)


def random_window(rng: random.Random) -> Window:
    return Window(in_flight=rng.randint(1, 8), window=rng.randint(0, 12))


def test_any_windows_may_follow_each_other() -> None:
    # The queue asserts its bound at every consumption; what follows it is a window of its own.
    for seed in range(300):
        rng = random.Random(seed)
        queue = Queue(random_window(rng), batch=2)
        used, ends = [queue.lag_bound], []
        while len(ends) < 80:
            kind = rng.random()
            if kind < 0.03:
                queue.adopt(random_window(rng))
                used.append(Queue(queue.policy, batch=2).lag_bound)
            elif kind < 0.4:
                queue.admit()
            elif kind < 0.65 and queue.running:
                queue.finish(rng.choice(queue.running))
            elif kind < 0.7:
                state = json.loads(json.dumps(queue.state()))
                queue = Queue(queue.policy, batch=2)
                queue.restore(state)
                assert queue.state() == state
            elif queue.consumed < 2 * (queue.version + 1):
                if (number := queue.take()) is not None:
                    ends.append(number)
            else:
                queue.update()
            assert queue.lag_bound is not None
            assert queue.lag_bound in used, "no two windows make a wider bound"
        for _ in range(400):  # all that was admitted under other windows ends
            if queue.running:
                queue.finish(queue.running[0])
            if queue.take() is not None and queue.consumed % 2 == 0:
                queue.update()
            queue.admit()
        assert queue.lag_bound == used[-1]
        assert sorted(ends) == sorted(set(ends))


def test_only_bounded_windows_follow_each_other() -> None:
    queue = Queue(Window(in_flight=2, window=1), batch=1)
    with pytest.raises(ValueError, match="bounded"):
        queue.adopt(greedy(3))
    with pytest.raises(ValueError, match="bounded"):
        Queue(greedy(3), batch=1).adopt(Window(in_flight=2, window=1))


def drifting() -> Items:
    """Light at first, heavy after 2,000 items."""
    rng = np.random.default_rng(0)
    parts = [Light().draw(2000, rng), LogNormal().draw(4000, rng)]
    seconds = np.concatenate(parts)
    zeros = np.zeros(len(seconds))
    return Items(
        compute=seconds, tool=zeros, length=seconds, domain=zeros.astype(int), names=("a",)
    )


def test_a_tuner_follows_the_latencies_and_says_why() -> None:
    items, start = drifting(), Window(in_flight=8, window=0)
    found = []
    for online in (False, True):
        tuner = Tuner(OnlineConfig(tune=TUNE, every=40), batch=8)
        lanes = Lanes([LaneConfig(name="all", policy=start)], batch=8)
        trainer = TrainerConfig(seconds=0.2, updates=600)
        played = play(
            items, lanes, ((0,),), FleetConfig(), trainer, tuner=tuner if online else None
        )
        found.append((played, tuner))
    (fixed, silent), (tuned, tuner) = found
    assert silent.log == []
    assert tuned.makespan < 0.7 * fixed.makespan
    assert tuned.updates.max() <= TUNE.updates
    assert [one.updates for one in tuner.log] == list(range(40, 601, 40)), "each look is logged"
    adopted = [one.window for one in tuner.log if one.window is not None]
    assert 1 <= len(adopted) < len(tuner.log), "what is good enough stays"
    assert adopted[0].window == 0, "light latencies need no window"
    assert adopted[-1].window, "heavy ones get one"
    assert all("picked: N=" in " ".join(one.reasons) for one in tuner.log)


def test_budgets_that_nothing_keeps_leave_the_window() -> None:
    tight = TuneConfig(updates=12, skew=1e-6, horizon=30, steps=2)
    failing = FleetConfig(item_failures=0.5)
    tuner = Tuner(OnlineConfig(tune=tight, every=1), batch=8, fleet=failing)
    for seconds in LogNormal().draw(200, np.random.default_rng(1)):
        tuner.observe(float(seconds), 0.0, 1.0)
    assert tuner.updated(0.2, (8, 0)) is None
    assert "skew=1e-06" in tuner.log[0].reasons[0]


def test_a_restored_tuner_picks_the_same() -> None:
    cfg = OnlineConfig(tune=TUNE, every=3, memory=150)
    one = Tuner(cfg, batch=8)
    for seconds in LogNormal().draw(400, np.random.default_rng(1)):
        one.observe(float(seconds), 0.0, 1.0)
    other = Tuner(cfg, batch=8)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    picks = [[t.updated(0.2, (8, 0)) for _ in range(3)] for t in (one, other)]
    assert picks[0] == picks[1]
    assert picks[0][:2] == [None, None]
    assert picks[0][2] is not None
    with pytest.raises(UserError, match="keys are"):
        one.restore({})


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        OnlineConfig(tune=TUNE, every=0)
    with pytest.raises(ValueError, match="memory=5"):
        OnlineConfig(tune=TUNE, memory=5)
    items, trainer = drifting(), TrainerConfig(seconds=0.2, updates=3)
    tuner = Tuner(OnlineConfig(tune=TUNE), batch=8)
    lanes = Lanes([LaneConfig(name="all", policy=greedy(8))], batch=8)
    with pytest.raises(UserError, match="a tuner sets windows"):
        play(items, lanes, ((0,),), FleetConfig(), trainer, tuner=tuner)
    window = Window(in_flight=8, window=0)
    two = Lanes([LaneConfig(name=n, policy=window, share=0.5) for n in "ab"], batch=8)
    with pytest.raises(UserError, match="several lanes"):
        play(items, two, ((0,), (0,)), FleetConfig(), trainer, tuner=tuner)
