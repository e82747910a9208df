"""Fills the generation queues of all domains and hands out what their windows allow.

Tasks go in by number, groups of episodes come out, each number exactly once: item k of lane l among
L lanes has the number k L + l, in the pool and everywhere outside its queue. A head that holds
the others up past its deadline is cancelled instead, counted, and its place goes to another. A
group counts as finished only when the pool holds it durably, so a killed run loses work, never an
item. While the pool's store is away, groups wait for it in their places: nothing new is admitted,
and no deadline ends one. What a policy drops is cancelled, or stays in the pool unread.
Everything here runs on one event loop; the window itself is sans-IO.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forge_jax.agents.curriculum import Source
from forge_jax.config import FilterConfig, ProtectConfig, UserError
from forge_jax.rl.broken import Broken
from forge_jax.rl.broken import Group as Group
from forge_jax.rl.durable import Durable
from forge_jax.rl.evaluate import SOLVED
from forge_jax.rl.resume import admitted_later, newest, without_lost
from forge_jax.rl.tuning import Tuning
from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.lanes import Lanes
from forge_jax.sched.policies import Why
from forge_jax.sched.pool import Pool
from forge_jax.sched.watch import Evicted
from forge_jax.types import Task

logger = logging.getLogger(__name__)

EVERYTHING = FilterConfig()
LEAST_WAIT = 0.05  # seconds between two looks at a head that is overdue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """One consumed item."""

    number: int
    lag: int  # items consumed between its admission and its own consumption
    updates: int  # ... updates complete
    episodes: Group  # empty if the pool's object was corrupt
    domain: str = ""  # name of its lane
    again: bool = False  # True: it said nothing, and another of its domain took its place


class Collector:
    """Owns what is in flight: admits tasks while places are free, and plays them."""

    def __init__(
        self,
        *,
        lanes: Lanes,
        pool: Pool,
        sources: Sequence[Source],
        play: Callable[[int, Task], Awaitable[Group | None]],
        patience: float,
        most_broken: int = ProtectConfig().most_broken,
        tunings: Sequence[Tuning] = (),
        filters: FilterConfig = EVERYTHING,
        constant: Callable[[Group], bool] = lambda group: False,
    ):
        """`sources`, and `tunings` if any: one for each lane. `play` gives None for a group to be
        given up. `patience`: seconds that the pool's store may be away; `most_broken`: items in a
        row that `play` may raise in. `constant`: whether a group says nothing; asked in a thread.
        """
        self.lanes, self.sources, self.tunings = lanes, tuple(sources), tuple(tunings)
        self._pool, self._play = pool, play
        self._durable, self._broken = Durable(pool, patience, self._turned), Broken(most_broken)
        self._filters, self._constant = filters, constant
        self._tasks: dict[int, Task] = {}  # of admitted, unconsumed numbers
        self._stored: dict[int, Task] = {}  # of numbers whose episodes the pool already holds
        self._running: dict[int, asyncio.Task[None]] = {}
        self._changed, self._deleting = asyncio.Event(), asyncio.Lock()

    def fill(self, workers: asyncio.TaskGroup) -> None:
        """Admits tasks while places are free and starts playing them."""
        for lane, source in enumerate(self.sources):
            while (place := self.lanes.admit(lane)) is not None:
                number = self._number(lane, place)
                self._tasks[number] = next(source)
                self._start(number, workers)

    def resume(self, workers: asyncio.TaskGroup) -> None:
        """Starts again what was in flight when the restored state was taken."""
        for lane, queue in enumerate(self.lanes.queues):
            for place in queue.running:
                self._start(self._number(lane, place), workers)

    async def take(self, workers: asyncio.TaskGroup) -> list[Taken]:
        """Consumes a batch, each lane's quota of it, waiting as the windows demand.

        A consumed item frees its place at once, but where the lanes are `exact`. An item that the
        filter leaves aside is handed out beside its quota.
        """
        taken: list[tuple[Taken, Task]] = []
        tries = [self._filters.tries or 0] * len(self.sources)
        while any(self.lanes.left):
            # What is old grows no younger while the store is away; deadlines wait for it.
            self._evict(workers, None if self._durable.away else time.monotonic())
            found = self.lanes.take()
            if found is None:
                await self._change()
                continue
            lane, number = found[0], self._number(*found)
            queue = self.lanes.queues[lane]
            lag, updates = queue.last_lag, queue.last_updates
            task = self._tasks.pop(number)
            self.fill(workers)
            group = await self._durable.call(functools.partial(self._read, number))
            silent = self._filters.constant and await asyncio.to_thread(self._constant, group)
            if silent and tries[lane]:
                tries[lane] -= 1
                self.lanes.again(lane)
                self.fill(workers)
            one = Taken(
                number=number, lag=lag, updates=updates, episodes=group,
                domain=self.lanes.names[lane], again=silent,
            )  # fmt: skip
            taken.append((one, task))
        self.lanes.rest(time.monotonic())
        again = self._settle(sorted(taken, key=lambda pair: pair[0].number))
        self.lanes.next_batch()
        return [dataclasses.replace(one, again=one.number in again) for one, _ in taken]

    def _settle(self, taken: Sequence[tuple[Taken, Task]]) -> set[int]:
        """Tells lanes and sources what a batch came to, in order of number: what they do next does
        not depend on what finished first. Of the items that said nothing the first ones, as many
        as there were tries, have been made good by others: their numbers."""
        tries = [self._filters.tries or 0] * len(self.sources)
        made_good = set()
        for item, task in taken:
            lane = item.number % len(self.sources)
            if item.again and tries[lane]:
                tries[lane] -= 1
                made_good.add(item.number)
            else:
                turns = [turn for episode in item.episodes for turn in episode.turns]
                self.lanes.count(lane, sum(len(turn.output) for turn in turns))
            valid = [e.outcome.reward for e in item.episodes if e.outcome.valid]
            self.sources[lane].learn(task, sum(r >= SOLVED for r in valid), len(valid))
        return made_good

    def _number(self, lane: int, place: int) -> int:
        return place * len(self.sources) + lane

    @property
    def counts(self) -> dict[str, int]:
        """Faults so far: calls of the pool that were made again, items that were broken."""
        return {"pool_retries": self._durable.retries, "items_broken": self._broken.count}

    def given_up(self) -> Mapping[Why, int]:
        """How many items were given up so far, by the reason."""
        return {why: sum(queue.evicted[why] for queue in self.lanes.queues) for why in Why}

    def _evict(self, workers: asyncio.TaskGroup, now: float | None) -> None:
        """Gives up what the policies drop and, at a time, heads that are overdue; fills their
        places."""
        for lane in range(len(self.sources)):
            for gone in self.lanes.evict(lane, now):
                if (run := self._running.get(self._number(lane, gone.number))) is not None:
                    run.cancel()
                self._gone(lane, gone, workers)

    def _gone(self, lane: int, gone: Evicted, workers: asyncio.TaskGroup) -> None:
        """An item is given up: its place goes to another."""
        number = self._number(lane, gone.number)
        logger.warning("item %d is given up: %s", number, gone.why)
        task = self._tasks.pop(number)
        if gone.again is not None:
            again = self._number(lane, gone.again)
            self._tasks[again] = task
            self._start(again, workers)
        self.fill(workers)

    def _turned(self) -> None:
        """The pool's store went away or is back: deadlines stand still or go on."""
        self.lanes.rest(time.monotonic())
        self._changed.set()

    async def _change(self) -> None:
        """Returns when an item has finished, or the head may be overdue."""
        self._changed.clear()
        due = min(queue.due for queue in self.lanes.queues)
        seconds = None if due == math.inf else max(due - time.monotonic(), LEAST_WAIT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _read(self, number: int) -> Group:
        try:
            return tuple(self._pool.get(number))
        except CorruptObject:
            return ()  # the pool has put the object aside; the caller counts the empty group

    def _start(self, number: int, workers: asyncio.TaskGroup) -> None:
        stored, task = self._stored.pop(number, None), self._tasks[number]
        if stored == task:
            self._finish(number)
        else:  # the lost session may have given the number to another task
            run = workers.create_task(self._run(number, task, workers, stored is not None))
            self._running[number] = run
            run.add_done_callback(lambda _: self._running.pop(number))

    def updated(self) -> None:
        """An update is complete, and what is sampled from now on has its weights."""
        self.lanes.update()

    def cancel(self) -> None:
        """Ends everything in flight; its items stay unconsumed."""
        for run in self._running.values():
            run.cancel()

    async def _run(self, number: int, task: Task, workers: asyncio.TaskGroup, other: bool) -> None:
        if other:  # what the pool has under the number is of another task
            async with self._deleting:
                await self._durable.call(lambda: self._pool.delete({number}))
        place, lane = divmod(number, len(self.sources))
        episodes = await self._played(number, task)
        if episodes is None:
            self._gone(lane, self.lanes.queues[lane].expire(place), workers)
            self._changed.set()
            return
        await self._durable.call(lambda: self._pool.put(number, episodes))
        self._finish(number)
        if not self.lanes.queues[lane].policy.holds:  # generation goes on, also while nobody takes
            self._evict(workers, None)
            self.fill(workers)

    async def _played(self, number: int, task: Task) -> Group | None:
        """What a group came to; where an error of our own ended it, the outcome of that."""
        try:
            group = await self._play(number, task)
            if self.tunings and group is not None:
                self.tunings[number % len(self.sources)].ended(group)
        except Exception as error:
            return self._broken.group(number, task, error)
        return self._broken.whole(group)

    def _finish(self, number: int) -> None:
        place, lane = divmod(number, len(self.sources))
        self.lanes.queues[lane].finish(place)
        self._changed.set()

    def state(self) -> dict[str, Any]:
        """The cursors as plain JSON: lanes, sources, and the tasks in flight."""
        return {
            "lanes": self.lanes.state(),
            "sources": [source.state() for source in self.sources],
            "tuning": [tuning.state() for tuning in self.tunings],
            "tasks": {str(n): dataclasses.asdict(task) for n, task in self._tasks.items()},
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Continues from `state`, taken after update `version`.

        The pool may hold more than the state knows: groups that only weights up to
        `version` sampled are used as they are, all others are deleted and played again,
        and so is a finished group that the pool has lost. Raises UserError if the state
        does not fit this run.
        """
        if "lanes" not in state:
            raise UserError(f"the checkpoint's cursors have {sorted(state)}, of an earlier program")
        self._tasks = {int(n): Task(**task) for n, task in state["tasks"].items()}
        queues = [state["lanes"]["queues"].get(name) for name in self.lanes.names]
        if len(queues) != len(state["lanes"]["queues"]) or None in queues:
            known = list(state["lanes"]["queues"])
            raise UserError(f"the checkpoint has the domains {known}, not {self.lanes.names}")
        unconsumed = [
            n for n in self._pool.items() if n in self._tasks or admitted_later(n, queues)
        ]
        found = {n: self._usable(n, version) for n in unconsumed}
        usable = {n: task for n, task in found.items() if task is not None}
        self._pool.delete(set(unconsumed) - usable.keys())
        kept = [without_lost(lane, queues, usable.keys()) for lane in range(len(queues))]
        named = dict(zip(self.lanes.names, kept, strict=True))
        # One of the two is empty where only one of the sessions tunes.
        for tuning, saved in zip(self.tunings, state["tuning"], strict=False):
            tuning.restore(saved)
        self.lanes.restore({**state["lanes"], "queues": named})
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.restore(saved)
        ended = [self._number(at, n) for at, q in enumerate(self.lanes.queues) for n in q.finished]
        self._stored = {n: task for n, task in usable.items() if n not in ended}

    def _usable(self, number: int, version: int) -> Task | None:
        """Of which task the pool has a group that no later weights sampled; None: of none."""
        try:
            group = self._pool.get(number)
        except CorruptObject:
            return None
        return group[0].task if group and newest(group) <= version else None
