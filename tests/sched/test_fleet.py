"""The simulator of a fleet: against the plain one, closed forms, and what faults come to."""

import dataclasses
import random

import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.sched.fleet import play
from forge_jax.sched.instances import FleetConfig
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.latency import Bimodal, Domain, Items, Light, LogNormal, Pareto, mixture
from forge_jax.sched.played import Played, TrainerConfig
from forge_jax.sched.policies import (
    GreedyDrop,
    Policy,
    Stream,
    VersionWindow,
    Why,
    Window,
    fifo,
    greedy,
    stream_staleness,
)
from forge_jax.sched.queue import Deadline
from forge_jax.sched.simulate import Trace, simulate
from forge_jax.sched.skew import over_time, report

ONE = FleetConfig()


def plain(service: list[float]) -> Items:
    seconds = np.array(service, np.float64)
    zeros = np.zeros(len(seconds))
    return Items(
        compute=seconds, tool=zeros, length=seconds, domain=zeros.astype(int), names=("a",)
    )


def single(
    items: Items,
    policy: Policy,
    batch: int,
    train: float,
    *,
    fleet: FleetConfig = ONE,
    updates: int | None = None,
    deadline: Deadline | None = None,
    seed: int = 0,
) -> Played:
    lanes = Lanes([LaneConfig(name="all", policy=policy, deadline=deadline)], batch=batch)
    own = (tuple(range(len(items.names))),)
    return play(items, lanes, own, fleet, TrainerConfig(seconds=train, updates=updates), seed=seed)


def test_without_load_and_faults_it_is_the_plain_simulator() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        trace = Trace(
            service=tuple(float(rng.randint(1, 12)) for _ in range(rng.randint(1, 30))),
            train_seconds=float(rng.randint(0, 5)),
            in_flight=rng.randint(1, 8),
            batch=rng.randint(1, 10),
        )
        window = rng.choice([None, 0, 1, 3, 12])
        one = simulate(trace, window)
        policy = Window(in_flight=trace.in_flight, window=window)
        other = single(plain(list(trace.service)), policy, trace.batch, trace.train_seconds)
        assert (other.item.tolist(), other.lag.tolist()) == (one.order, one.lags), seed
        assert other.makespan == one.makespan
        assert other.trainer_idle == pytest.approx(one.trainer_idle)
        assert other.place_idle == pytest.approx(one.generator_idle, abs=1e-12)


def test_items_share_an_instance_by_hand() -> None:
    # Speed 1 alone, 1/2 for two. The first has a second left when the second one comes.
    items = plain([1.0, 2.0, 2.0])
    slow = FleetConfig(slowdown=1.0)
    played = single(items, greedy(2), 1, 0.0, fleet=slow)
    # 0 and 1 share: 0 ends at 2, then 1 (one second left) and 2 share: 1 ends at 4, 2 at 5.
    assert played.time.tolist() == pytest.approx([2.0, 4.0, 5.0])
    assert played.instance_idle == pytest.approx(0.0)
    apart = single(items, greedy(2), 1, 0.0, fleet=FleetConfig(slowdown=1.0, instances=2))
    assert apart.time.tolist() == pytest.approx([1.0, 2.0, 3.0])


def test_tools_run_elsewhere() -> None:
    items = dataclasses.replace(plain([1.0, 1.0]), tool=np.array([10.0, 0.0]))
    played = single(items, greedy(2), 1, 0.0, fleet=FleetConfig(slowdown=1.0))
    assert played.item.tolist() == [1, 0]
    assert played.time.tolist() == pytest.approx([2.0, 12.0])
    assert played.instance_idle == pytest.approx(10 / 12)


POLICIES = {
    "fifo": fifo(64),
    "window": Window(in_flight=64, window=20),
    "greedy": greedy(64),
    "drop": GreedyDrop(in_flight=64, max_updates=9),
    "versions": VersionWindow(in_flight=64, versions=2),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_mean_lag_is_the_places_and_its_bound_holds(name: str) -> None:
    items = mixture([Domain(name="a", share=1.0, compute=LogNormal())], 6000, seed=1)
    played = single(items, POLICIES[name], 8, 0.15, updates=600)
    bounds = POLICIES[name].bounds(8, 0)
    if bounds is not None:
        assert played.lag.max() <= bounds.items
        assert played.updates.max() <= bounds.updates
    if name != "drop":  # Little's law, while the queue is full
        assert played.lag[200:].mean() == pytest.approx(63, rel=0.03)
        assert played.updates[200:].mean() == pytest.approx(63 / 8, rel=0.06)


def test_dropping_what_is_old_trains_on_short_work_and_a_window_does_not() -> None:
    items = mixture([Domain(name="a", share=1.0, compute=LogNormal())], 20_000, seed=0)
    train = 0.9 * 16 / 128  # generation is slightly ahead
    drop = report(
        items, single(items, GreedyDrop(in_flight=128, max_updates=9), 16, train, updates=800)
    )
    window = report(items, single(items, Window(in_flight=128, window=64), 16, train, updates=800))
    free = report(items, single(items, greedy(128), 16, train, updates=800))
    assert drop.skew_duration < -0.1
    assert drop.given_up > 0.02
    assert abs(window.skew_duration) < 0.05
    assert abs(free.skew_duration) < 0.05, "greedy has a start-up transient and no lasting bias"
    assert free.skew_start < window.skew_start
    assert free.items_per_second > window.items_per_second
    assert free.lag_max > window.lag_max


@pytest.mark.parametrize("supply", [0.3, 0.8, 1.5, 3.0])
@pytest.mark.parametrize("buffer", [1, 2])
def test_the_published_mean_staleness(supply: float, buffer: int) -> None:
    running, batch = 96, 16
    items = mixture([Domain(name="a", share=1.0, compute=LogNormal())], 10_000, seed=2)
    train = supply * batch * float(items.compute.mean()) / running
    policy = Stream(running=running, buffer=buffer * batch)
    played = single(items, policy, batch, train, updates=500)
    told = stream_staleness(running, batch, supply, buffer)
    assert played.updates[2000:].mean() == pytest.approx(told, abs=0.4)


def test_failures_lose_time_and_no_item() -> None:
    items = mixture([Domain(name="a", share=1.0, compute=LogNormal())], 3000, seed=3)
    fleet = FleetConfig(
        instances=5, slowdown=0.1, failure_seconds=20.0, repair_seconds=4.0, item_failures=0.1
    )
    calm = dataclasses.replace(fleet, failure_seconds=float("inf"))
    one, again, quiet = (
        single(items, Window(in_flight=40, window=20), 8, 0.2, fleet=f)
        for f in (fleet, fleet, calm)
    )
    assert sorted(one.item.tolist()) == list(range(3000)), "each exactly once"
    assert one.item.tolist() == again.item.tolist()
    assert one.makespan == again.makespan
    assert one.lost > 0 == quiet.lost
    assert one.makespan > quiet.makespan
    assert one.failed.mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_hung_head_costs_a_deadline(requeue: bool) -> None:
    items = mixture([Domain(name="a", share=1.0, compute=Light())], 400, seed=0)
    fleet = FleetConfig(hangs=0.01)
    deadline = Deadline(seconds=3.0, requeue=requeue)
    policy = Window(in_flight=16, window=8)
    played = single(items, policy, 4, 0.01, fleet=fleet, deadline=deadline)
    hung = len(played.evicted)
    assert hung > 0
    assert sorted([*played.item, *played.evicted]) == list(range(400))
    assert played.counts[Why.EXPIRED] == hung
    assert played.counts[Why.REQUEUED] == (hung if requeue else 0)
    calm = single(items, policy, 4, 0.01)
    assert played.makespan <= calm.makespan + (2 if requeue else 1) * hung * (3.0 + 1.2)
    with pytest.raises(UserError, match="no deadline gives up"):
        single(items, policy, 4, 0.01, fleet=fleet)


def test_a_tenfold_gap_in_speed_leaves_the_shares() -> None:
    domains = [
        Domain(name="fast", share=0.5, compute=LogNormal(mean=1.0)),
        Domain(name="slow", share=0.5, compute=LogNormal(mean=10.0)),
    ]
    items = mixture(domains, 8000, seed=0)
    window = Window(in_flight=32, window=16)
    lanes = Lanes(
        [
            LaneConfig(name="fast", policy=window, share=0.7),
            LaneConfig(name="slow", policy=window, share=0.3),
        ],
        batch=9,
    )
    trainer = TrainerConfig(seconds=0.1, updates=300)
    played = play(items, lanes, ((0,), (1,)), ONE, trainer)
    batches = items.domain[played.item].reshape(-1, 9).sum(1)
    assert set(batches) == {2, 3}, "in every update"
    assert abs(batches.cumsum() - 2.7 * np.arange(1, 301)).max() < 1
    greedy_lane = single(items, GreedyDrop(in_flight=64, max_updates=9), 9, 0.1, updates=300)
    assert items.domain[greedy_lane.item].mean() < 0.35, "dropping starves the slow domain"


def test_a_report_over_time_adds_up() -> None:
    items = mixture(
        [
            Domain(name="a", share=0.4, compute=Pareto(), tool=Bimodal()),
            Domain(name="b", share=0.6, compute=Light(mean=3.0)),
        ],
        2000,
        seed=0,
    )
    played = single(items, greedy(100), 10, 0.1)
    rows = over_time(items, played, 20)
    assert rows["duration"][0] < -0.2 < 0.2 < rows["duration"][-1], "the longest end last"
    assert rows["duration"].mean() == pytest.approx(0.0, abs=1e-9), "all of it is no bias"
    assert rows["time"][-1] == played.time[-1]
    assert rows["lag"].max() == played.lag.max()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FleetConfig(instances=0), "instances=0"),
        (lambda: FleetConfig(slowdown=-1.0), "slowdown=-1.0"),
        (lambda: FleetConfig(hangs=2.0), "hangs=2.0"),
        (lambda: FleetConfig(failure_seconds=0.0), "failure_seconds=0.0"),
        (lambda: TrainerConfig(seconds=-1.0), "seconds=-1.0"),
        (lambda: TrainerConfig(seconds=1.0, updates=0), "updates=0"),
        (lambda: Pareto(alpha=1.0), "alpha=1.0"),
        (lambda: LogNormal(sigma=0.0), "sigma=0.0"),
        (lambda: mixture([Domain(name="a", share=0.5, compute=Light())], 9, 0), "0.5"),
        (lambda: Lanes([LaneConfig(name="a", policy=fifo(2), share=0.5)], batch=4), "0.5"),
        (
            lambda: Lanes([LaneConfig(name=n, policy=fifo(2), share=0.5) for n in "ab"], batch=1),
            "a:",
        ),
        (lambda: Lanes([LaneConfig(name="a", policy=fifo(2), share=0.5)] * 2, batch=4), "names"),
    ],
)
def test_impossible_settings_are_refused(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
