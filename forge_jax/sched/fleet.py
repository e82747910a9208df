"""A discrete-event simulation of many instances that feed one trainer through its queues.

Flows in: items, lanes with their policies, a fleet, and the trainer's pace. Flows out: every
consumption with its time and lag, every item given up, and who idled. The invariant: the order is
that of the `Queue` itself, so what holds here holds in a run; equal arguments give equal results.

Time is in seconds from 0. Items are admitted in order, at once, while a lane has a place. An idle
trainer consumes whatever its quotas let it until it holds a batch, then trains and consumes
nothing. A consumed item frees its place at once. At one instant ends come before consumption.
"""

import heapq
import math
from collections.abc import Callable

import numpy as np

from forge_jax.config import UserError
from forge_jax.sched.instances import FleetConfig, Instances, faults
from forge_jax.sched.lanes import Lanes
from forge_jax.sched.latency import Items
from forge_jax.sched.played import Played, Resizer, TrainerConfig
from forge_jax.sched.policies import Why, Window

COMPUTED, TOOL, REPAIRED, FAILED, TRAINED = range(5)  # kinds of events, first things first


def play(
    items: Items,
    lanes: Lanes,
    domains: tuple[tuple[int, ...], ...],
    fleet: FleetConfig,
    trainer: TrainerConfig,
    *,
    seed: int = 0,
    tuner: Resizer | None = None,
    progress: Callable[[int], None] = lambda consumed: None,
) -> Played:
    """Plays `items`; lane l admits those whose domain is in `domains[l]`, in their order.

    O(n log n). Raises UserError where a lane has no items, where several have no number of updates
    to end after, and where everything waits for ever (an item hangs, no deadline gives it up).
    """
    if trainer.updates is None and len(lanes.names) > 1:
        raise UserError("updates=None: several lanes need a number of updates, to end at")
    if tuner is not None and len(lanes.names) > 1:
        raise UserError("a tuner has one window to set, and there are several lanes")
    one = _Play(items, lanes, domains, fleet, trainer, seed, tuner, progress)
    one.run()
    return one.played()


class _Play:
    """One simulation under way."""

    def __init__(
        self,
        items: Items,
        lanes: Lanes,
        domains: tuple[tuple[int, ...], ...],
        fleet: FleetConfig,
        trainer: TrainerConfig,
        seed: int,
        tuner: Resizer | None,
        progress: Callable[[int], None],
    ):
        rng = np.random.default_rng(seed)
        cut, hangs = faults(fleet, len(items), rng)
        self.rng, self.fleet, self.trainer, self.lanes = rng, fleet, trainer, lanes
        self.items, self.tuner, self.progress = items, tuner, progress
        self.compute, self.cut = (items.compute * cut).tolist(), (cut < 1).tolist()
        self.tool = np.where(hangs, math.inf, np.where(cut < 1, 0.0, items.tool)).tolist()
        self.supply = [np.flatnonzero(np.isin(items.domain, own)).tolist() for own in domains]
        for name, own in zip(lanes.names, self.supply, strict=True):
            if not own:
                raise UserError(f"lane {name} has no items")
        self.owner: list[list[int]] = [[] for _ in domains]  # by number: the item
        self.next = [0] * len(domains)  # of `supply`
        self.runs: dict[int, tuple[int, int]] = {}  # by run: (lane, number) that computes
        self.run_of: dict[tuple[int, int], int] = {}
        self.started = 0
        self.instances = Instances(fleet)
        self.events: list[tuple[float, int, int, int]] = []  # (time, kind, what, stamp)
        self.now = self.waited = self.place_seconds = self.places_seconds = 0.0
        self.places = sum(queue.policy.places for queue in lanes.queues)
        self.training = self.over = False
        self.held = self.done = 0  # items of the batch at hand; updates complete
        self.taken: list[tuple[int, float, int, int]] = []
        self.admitted: list[int] = []
        self.evicted: list[int] = []
        for instance in range(fleet.instances if fleet.failure_seconds < math.inf else 0):
            self.expect_failure(instance)

    def run(self) -> None:
        self.settle()
        while not self.over:
            at = min([queue.due for queue in self.lanes.queues])
            if self.events and self.events[0][0] < at:
                at = self.events[0][0]
            if at == math.inf:
                raise UserError(
                    f"everything waits for ever from {self.now:.6g} s on: an item hangs that no "
                    "deadline gives up"
                )
            self.pass_to(at)
            while self.events and self.events[0][0] <= at:
                _, kind, what, stamp = heapq.heappop(self.events)
                self.handle(kind, what, stamp)
                self.collect()
            self.settle()

    def pass_to(self, at: float) -> None:
        passed = at - self.now
        self.place_seconds += passed * len(self.runs)
        self.places_seconds += passed * self.places
        if not self.training:
            self.waited += passed
        self.now = at

    def handle(self, kind: int, what: int, stamp: int) -> None:
        if kind == COMPUTED:
            run = self.instances.ended(what, stamp, self.now)
            if run is not None:
                self.computed(run)
        elif kind == TOOL:
            if what in self.runs:
                self.finish(what)
        elif kind == FAILED:
            self.instances.fail(what, self.now)
            self.push(self.now + self.fleet.repair_seconds, REPAIRED, what)
        elif kind == REPAIRED:
            self.instances.repair(what, self.now)
            self.expect_failure(what)
        else:
            self.trained()

    def computed(self, run: int) -> None:
        lane, number = self.runs[run]
        seconds = self.tool[self.owner[lane][number]]
        if seconds == 0:
            self.finish(run)
        elif seconds < math.inf:
            self.push(self.now + seconds, TOOL, run)

    def finish(self, run: int) -> None:
        lane, number = self.runs.pop(run)
        del self.run_of[lane, number]
        self.lanes.queues[lane].finish(number)
        if self.tuner is not None:
            item = self.owner[lane][number]
            length = float(self.items.length[item])
            self.tuner.observe(self.compute[item], self.tool[item], length)

    def settle(self) -> None:
        """All that can happen at this instant without time passing."""
        while True:
            changed = self.evict() + self.admit()
            if not self.training and not self.over and (taken := self.lanes.take()) is not None:
                self.consume(*taken)
            elif not changed:
                break
        if not self.training and not self.over and self.trainer.updates is None and self.ended():
            if self.held:
                self.train()
            else:
                self.over = True

    def ended(self) -> bool:
        if any(n < len(own) for n, own in zip(self.next, self.supply, strict=True)):
            return False
        return not any(queue.in_service or queue.waiting for queue in self.lanes.queues)

    def evict(self) -> int:
        count = 0
        for lane in range(len(self.supply)):
            for gone in self.lanes.evict(lane, None if self.training else self.now):
                count += 1
                item = self.owner[lane][gone.number]
                run = self.run_of.pop((lane, gone.number), None)
                if run is not None:
                    del self.runs[run]
                    self.instances.remove(run, self.now)
                    self.collect()
                if gone.again is None:
                    self.evicted.append(item)
                else:
                    self.start(lane, gone.again, item)
        return count

    def admit(self) -> int:
        count = 0
        for lane, (queue, own) in enumerate(zip(self.lanes.queues, self.supply, strict=True)):
            while self.trainer.updates is not None or self.next[lane] < len(own):
                if (number := queue.admit()) is None:
                    break
                item = own[self.next[lane] % len(own)]
                self.next[lane] += 1
                self.admitted.append(item)
                self.start(lane, number, item)
                count += 1
        return count

    def start(self, lane: int, number: int, item: int) -> None:
        run, self.started = self.started, self.started + 1
        self.owner[lane].append(item)
        self.runs[run], self.run_of[lane, number] = (lane, number), run
        self.instances.place(run, self.compute[item], self.now)
        self.collect()

    def consume(self, lane: int, number: int) -> None:
        queue = self.lanes.queues[lane]
        item = self.owner[lane][number]
        self.taken.append((item, self.now, queue.last_lag, queue.last_updates))
        self.held += 1
        if self.held == self.lanes.batch:
            self.train()

    def train(self) -> None:
        self.training = True
        self.lanes.rest(self.now)
        self.push(self.now + self.trainer.seconds, TRAINED, 0)

    def trained(self) -> None:
        self.training, self.held, self.done = False, 0, self.done + 1
        self.lanes.update()
        self.lanes.next_batch()
        self.progress(len(self.taken))
        if self.tuner is not None:
            self.retune(self.tuner)
        self.over = self.done == self.trainer.updates

    def retune(self, tuner: Resizer) -> None:
        (queue,) = self.lanes.queues
        policy = queue.policy
        if not isinstance(policy, Window) or policy.window is None:
            raise UserError(f"a tuner sets windows, and the policy is {policy}")
        other = tuner.updated(self.trainer.seconds, (policy.in_flight, policy.window))
        if other is not None:
            queue.adopt(other)
            self.places = other.places

    def expect_failure(self, instance: int) -> None:
        self.push(self.now + self.rng.exponential(self.fleet.failure_seconds), FAILED, instance)

    def push(self, at: float, kind: int, what: int, stamp: int = 0) -> None:
        heapq.heappush(self.events, (at, kind, what, stamp))

    def collect(self) -> None:
        """Takes over what the instances have told."""
        for at, instance, stamp in self.instances.events:
            self.push(at, COMPUTED, instance, stamp)
        self.instances.events.clear()

    def played(self) -> Played:
        self.instances.settle(self.now)
        item, time, lag, updates = zip(*self.taken, strict=True) if self.taken else ((),) * 4
        end = max(self.now, 1e-300)
        counts = {why: sum(q.evicted[why] for q in self.lanes.queues) for why in Why}
        return Played(
            item=np.array(item, np.int64),
            time=np.array(time, np.float64),
            lag=np.array(lag, np.int64),
            updates=np.array(updates, np.int64),
            failed=np.array(self.cut)[np.array(item, np.int64)],
            admitted=np.array(self.admitted, np.int64),
            evicted=np.array(self.evicted, np.int64),
            counts=counts,
            lost=self.instances.lost,
            makespan=self.now,
            trainer_idle=self.waited / end,
            place_idle=1 - self.place_seconds / max(self.places_seconds, 1e-300),
            instance_idle=1 - self.instances.busy_seconds / (self.fleet.instances * end),
        )
