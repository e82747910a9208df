"""A discrete-event simulation of one trainer fed from a generation queue.

Flows in: how long each item is in service, and the sizes of the queue. Flows out: the
order of consumption and what it costs in lag, idle time and bias towards short items.
The invariant: the order is the `Queue`'s own, so what holds here holds in a run.

Time is in seconds from 0. Items are admitted in order, at once, while places are free,
and are in service from admission on. An idle trainer consumes one item whenever it can,
until it holds a batch; then it trains and consumes nothing. A consumed item frees its
place at once. At one instant finishes come before consumption, lower numbers first.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from forge_jax.config import check
from forge_jax.sched.policies import Window
from forge_jax.sched.queue import Queue


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What is simulated; item i is in service for `service[i]` seconds."""

    service: tuple[float, ...]
    train_seconds: float  # of one update
    in_flight: int  # N: items in service or finished but unconsumed
    batch: int  # P: items an update; the last may have fewer

    def __post_init__(self) -> None:
        check(len(self.service) > 0, "service=() must hold at least one item")
        for item, seconds in enumerate(self.service):
            fine = 0 <= seconds < math.inf
            check(fine, f"service[{item}]={seconds} must be a finite number >= 0")
        fine = 0 <= self.train_seconds < math.inf
        check(fine, f"train_seconds={self.train_seconds} must be a finite number >= 0")
        check(self.in_flight >= 1, f"in_flight={self.in_flight} must be at least 1")
        check(self.batch >= 1, f"batch={self.batch} must be at least 1")
        end = sum(self.service) + self.train_seconds * len(self.service)
        check(end < math.inf, f"service and train_seconds add up to {end}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What came of a trace."""

    order: list[int]  # items as consumed
    lags: list[int]  # of `order`: items consumed between admission and own consumption
    batches: list[list[int]]
    lag_bound: int | None  # None for greedy
    makespan: float  # end of the last update
    trainer_idle: float  # share of the makespan spent neither training nor consuming
    generator_idle: float  # mean share of the N places not in service
    skew: float  # mean service of the first half consumed over that of all, minus 1


def simulate(
    trace: Trace, window: int | None, progress: Callable[[int], None] = lambda consumed: None
) -> Schedule:
    """Plays `trace` under a window (0 is FIFO, None greedy), in O(n log n).

    `progress` is told the number of items consumed so far, once a batch.
    """
    queue = Queue(Window(in_flight=trace.in_flight, window=window), batch=trace.batch)
    total = len(trace.service)
    serving: list[tuple[float, int]] = []  # heap of (end of service, item)
    order: list[int] = []
    lags: list[int] = []
    now = waited = 0.0
    _admit(trace, queue, serving, now)
    while len(order) < total:
        while serving and serving[0][0] <= now:
            queue.finish(heapq.heappop(serving)[1])
        taken = queue.take()
        if taken is None:  # then the head is in service, and its end is still to come
            waited += serving[0][0] - now
            now = serving[0][0]
            continue
        order.append(taken)
        lags.append(queue.last_lag)
        _admit(trace, queue, serving, now)
        if len(order) % trace.batch == 0 or len(order) == total:
            # Nothing is admitted meanwhile, so what finishes can be told afterwards.
            now += trace.train_seconds
            queue.update()
            progress(len(order))
    return _schedule(trace, queue, order, lags, now, waited)


def _admit(trace: Trace, queue: Queue, serving: list[tuple[float, int]], now: float) -> None:
    while queue.admitted < len(trace.service) and (item := queue.admit()) is not None:
        heapq.heappush(serving, (now + trace.service[item], item))


def _schedule(
    trace: Trace, queue: Queue, order: list[int], lags: list[int], end: float, waited: float
) -> Schedule:
    total, served = len(order), math.fsum(trace.service)
    half = order[: max(1, total // 2)]
    half_mean = math.fsum(trace.service[item] for item in half) / len(half)
    return Schedule(
        order=order,
        lags=lags,
        batches=[order[i : i + trace.batch] for i in range(0, total, trace.batch)],
        lag_bound=queue.lag_bound,
        makespan=end,
        trainer_idle=waited / end if end > 0 else 0.0,
        generator_idle=max(0.0, 1 - served / (trace.in_flight * end)) if end > 0 else 0.0,
        skew=half_mean / (served / total) - 1 if served > 0 else 0.0,
    )
