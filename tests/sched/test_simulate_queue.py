"""The simulator against a brute-force one, closed forms, and the shape of a queue under load."""

import dataclasses
import random

import numpy as np
import pytest

from forge_jax.config import UserError, load
from forge_jax.sched.simulate import Schedule, Trace, simulate


def brute_force(trace: Trace, window: int | None) -> Schedule:
    """The same contract, second by second, from sets and minima; whole seconds only."""
    items = range(len(trace.service))
    start: dict[int, int] = {}
    before: dict[int, int] = {}
    order: list[int] = []
    batches: list[list[int]] = [[]]
    trains_until = now = waited = in_service = 0

    def finished(item: int) -> bool:
        return item in start and start[item] + trace.service[item] <= now

    while True:
        while True:  # all that happens at this second
            while len(start) < len(items) and len(start) - len(order) < trace.in_flight:
                before[len(start)] = len(order)
                start[len(start)] = now
            left = [item for item in items if item not in order]
            ready = [i for i in left if finished(i) and (window is None or i <= left[0] + window)]
            if not ready or trains_until > now:
                break
            order.append(min(ready, key=lambda i: (start[i] + trace.service[i], i)))
            batches[-1].append(order[-1])
            if len(batches[-1]) == trace.batch or len(order) == len(items):
                trains_until = now + int(trace.train_seconds)
                batches.append([])
        if len(order) == len(items):
            break
        waited += now >= trains_until
        in_service += sum(not finished(item) for item in start)
        now += 1

    half = order[: max(1, len(items) // 2)]
    mean = sum(trace.service) / len(items)
    end = trains_until
    return Schedule(
        order=order,
        lags=[at - before[item] for at, item in enumerate(order)],
        batches=[batch for batch in batches if batch],
        lag_bound=None if window is None else trace.in_flight + window - 1,
        makespan=end,
        trainer_idle=waited / end if end else 0.0,
        generator_idle=1 - in_service / (trace.in_flight * end) if end else 0.0,
        skew=sum(trace.service[i] for i in half) / len(half) / mean - 1 if mean else 0.0,
    )


def random_trace(rng: random.Random) -> Trace:
    longest = rng.choice([1, 3, 12])
    return Trace(
        service=tuple(float(rng.randint(0, longest)) for _ in range(rng.randint(1, 24))),
        train_seconds=float(rng.randint(0, 5)),
        in_flight=rng.randint(1, 8),
        batch=rng.randint(1, 10),
    )


@pytest.mark.parametrize("block", range(10))
def test_it_agrees_with_brute_force(block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        rng = random.Random(seed)
        trace, window = random_trace(rng), rng.choice([None, 0, 1, 3, 12])
        one, other = simulate(trace, window), brute_force(trace, window)
        for field in dataclasses.fields(Schedule):
            value = getattr(other, field.name)
            expected = pytest.approx(value, abs=1e-12) if isinstance(value, float) else value
            assert getattr(one, field.name) == expected, (field.name, trace, window)


def test_a_small_case_by_hand() -> None:
    # Three places, batches of two. Item 0 is slow; 1 and 2 finish at 1, and 3 at 2.
    trace = Trace(service=(5.0, 1.0, 1.0, 1.0, 1.0), train_seconds=2.0, in_flight=3, batch=2)
    schedule = simulate(trace, window=2)
    assert schedule.order == [1, 2, 0, 3, 4], "3 and 4 wait for the head, past [0, 2]"
    assert schedule.batches == [[1, 2], [0, 3], [4]]
    assert schedule.lags == [0, 1, 2, 2, 2]
    assert (schedule.makespan, schedule.lag_bound) == (9.0, 4)
    assert schedule.trainer_idle == pytest.approx((1 + 2) / 9)
    assert schedule.generator_idle == pytest.approx(1 - 9 / 27)
    assert schedule.skew == pytest.approx(1 / (9 / 5) - 1)
    assert simulate(trace, None).order == [1, 2, 3, 4, 0]
    assert simulate(trace, 0).order == [0, 1, 2, 3, 4]


def lognormal(count: int, in_flight: int, batch: int, supply: float, seed: int = 0) -> Trace:
    """Lognormal service (sigma 1, at most six means); `supply`: rollout over training rate."""
    service = np.random.default_rng(seed).lognormal(-0.5, 1.0, count).clip(max=6.0)
    train_seconds = supply * batch * float(service.mean()) / in_flight
    return Trace(
        service=tuple(service.tolist()),
        train_seconds=train_seconds,
        in_flight=in_flight,
        batch=batch,
    )


@pytest.mark.parametrize("window", [None, 0, 5, 64])
@pytest.mark.parametrize(("in_flight", "batch"), [(1, 1), (16, 4), (40, 64), (3000, 8)])
def test_the_mean_lag_does_not_depend_on_the_policy(
    window: int | None, in_flight: int, batch: int
) -> None:
    # Little's law, exact also while the queue drains: the k-th consumption admits item N - 1 + k,
    # so the lags add up to the same sum whatever the order.
    count = 2000
    lags = simulate(lognormal(count, in_flight, batch, 1.0), window).lags
    full = max(0, count - in_flight)
    assert sum(lags) == (count * (count - 1) - full * (full + 1)) // 2
    if in_flight <= 40:
        steady = lags[in_flight : count - in_flight]
        assert np.mean(steady) == pytest.approx(in_flight - 1, rel=0.15)


@pytest.mark.parametrize("window", [None, 0, 7])
def test_equal_service_is_first_in_first_out_and_fills_every_place(window: int | None) -> None:
    trace = Trace(service=(3.0,) * 60, train_seconds=0.0, in_flight=6, batch=4)
    schedule = simulate(trace, window)
    assert schedule.order == list(range(60))
    assert schedule.makespan == 30.0
    assert (schedule.trainer_idle, schedule.generator_idle, schedule.skew) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("supply", [1.0, 4.0])
def test_wider_windows_are_faster_and_later(supply: float) -> None:
    in_flight, batch = 512, 32
    windows = [0, 51, 153, 256, 512, None]
    trace = lognormal(20_000, in_flight, batch, supply)
    schedules = [simulate(trace, window) for window in windows]
    fastest = schedules[-1].makespan
    speeds = [fastest / s.makespan for s in schedules]
    assert speeds == sorted(speeds)
    largest = [max(s.lags) for s in schedules]
    assert largest == sorted(largest)
    for schedule in schedules[:-1]:
        assert schedule.lag_bound is not None
        assert max(schedule.lags) <= schedule.lag_bound
    if supply == 1.0:
        assert largest[:-2] == [s.lag_bound for s in schedules[:-2]], "a busy queue meets it"
        assert speeds[:3] == pytest.approx([0.18, 0.20, 0.22], abs=0.04)
        early = [np.mean([trace.service[i] for i in s.order[:512]]) for s in schedules]
        assert early[-1] < 0.4, "greedy starts with the short ones"
        assert early[0] > 0.9
    else:
        assert speeds[:3] == pytest.approx([0.68, 0.74, 0.86], abs=0.05)


def test_progress_is_told_once_a_batch() -> None:
    told: list[int] = []
    simulate(lognormal(10, 4, 4, 1.0), 2, told.append)
    assert told == [4, 8, 10]


GOOD = {"service": [1, 2.5], "train_seconds": 1, "in_flight": 2, "batch": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"service": []}, r"service=\(\)"),
        ({"service": [1, -1]}, r"service\[1\]=-1.0"),
        ({"service": [float("nan")]}, r"service\[0\]=nan"),
        ({"service": [1, 2, float("inf")]}, r"service\[2\]=inf"),
        ({"service": [1, "2"]}, r"service\[1\]='2'"),
        ({"service": [True]}, r"service\[0\]=True"),
        ({"service": 3}, "service=3"),
        ({"service": [1e308] * 2}, "add up to inf"),
        ({"train_seconds": -0.5}, "train_seconds=-0.5"),
        ({"train_seconds": None}, "train_seconds=None"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"in_flight": 2.5}, "in_flight=2.5"),
        ({"batch": 0}, "batch=0"),
        ({"batch": "4"}, "batch='4'"),
        ({"windows": 4}, "windows=4"),
    ],
)
def test_a_bad_trace_is_refused(change: dict, named: str) -> None:
    load(Trace, GOOD)
    with pytest.raises(UserError, match=named):
        load(Trace, GOOD | change)
