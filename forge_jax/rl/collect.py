"""Fills the generation queue and hands out what the window allows.

Tasks go in by number, groups of episodes come out, each number exactly once; a head that holds
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
from typing import Any, TypeVar

from forge_jax.agents.sources import TaskSource
from forge_jax.config import UserError
from forge_jax.sched.answers import StoreRefused, StoreUnavailable
from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.policies import Why
from forge_jax.sched.pool import Pool
from forge_jax.sched.queue import Queue
from forge_jax.types import Episode, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")
Group = tuple[Episode, ...]
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between two tries at a store that is away
LEAST_WAIT = 0.05  # seconds between two looks at a head that is overdue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """One consumed item."""

    number: int
    lag: int  # items consumed between its admission and its own consumption
    updates: int  # ... updates complete
    episodes: Group  # empty if the pool's object was corrupt


class Collector:
    """Owns what is in flight: admits tasks while places are free, and plays them."""

    def __init__(
        self,
        *,
        window: Queue,
        pool: Pool,
        source: TaskSource,
        play: Callable[[int, Task], Awaitable[Group]],
        patience: float,
    ):
        """`patience`: seconds that the pool's store may be away before StoreUnavailable ends
        the run."""
        self._window = window
        self._pool = pool
        self._source = source
        self._play = play
        self._patience = patience
        self.pool_retries = 0  # calls of the pool that were made again
        self._tasks: dict[int, Task] = {}  # of admitted, unconsumed numbers
        self._stored: set[int] = set()  # numbers whose episodes the pool already holds
        self._running: dict[int, asyncio.Task[None]] = {}
        self._away = 0  # calls that wait for the pool's store
        self._changed = asyncio.Event()

    def fill(self, workers: asyncio.TaskGroup) -> None:
        """Admits tasks while places are free and starts playing them."""
        while (number := self._window.admit()) is not None:
            self._tasks[number] = next(self._source)
            self._start(number, workers)

    def resume(self, workers: asyncio.TaskGroup) -> None:
        """Starts again what was in flight when the restored state was taken."""
        for number in self._window.running:
            self._start(number, workers)

    async def take(self, size: int, workers: asyncio.TaskGroup, refill: bool) -> list[Taken]:
        """Consumes `size` items, waiting as the window demands.

        With `refill` a consumed item frees its place at once; without, places stay
        free until the next `fill` (synchronous training).
        """
        taken: list[Taken] = []
        while len(taken) < size:
            # What is old grows no younger while the store is away; deadlines wait for it.
            self._evict(workers, None if self._away else time.monotonic())
            number = self._window.take()
            if number is None:
                await self._change()
                continue
            lag, updates = self._window.last_lag, self._window.last_updates
            del self._tasks[number]
            if refill:
                self.fill(workers)
            episodes = await self._durably(functools.partial(self._read, number))
            taken.append(Taken(number=number, lag=lag, updates=updates, episodes=episodes))
        return taken

    def given_up(self) -> Mapping[Why, int]:
        """How many items were given up so far, by the reason."""
        return dict(self._window.evicted)

    def _evict(self, workers: asyncio.TaskGroup, now: float | None) -> None:
        """Gives up what the policy drops and, at a time, heads that are overdue; fills their
        places."""
        for gone in self._window.evict(now):
            logger.warning("item %d is given up: %s", gone.number, gone.why)
            task = self._tasks.pop(gone.number)
            if gone.number in self._running:
                self._running[gone.number].cancel()
            if gone.again is not None:
                self._tasks[gone.again] = task
                self._start(gone.again, workers)
            self.fill(workers)

    async def _change(self) -> None:
        """Returns when an item has finished, or the head may be overdue."""
        self._changed.clear()
        due = self._window.due
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
        if number in self._stored:
            self._stored.discard(number)
            self._finish(number)
        else:
            run = workers.create_task(self._run(number, self._tasks[number], workers))
            self._running[number] = run
            run.add_done_callback(lambda _: self._running.pop(number))

    def updated(self) -> None:
        """An update is complete, and what is sampled from now on has its weights."""
        self._window.update()

    def cancel(self) -> None:
        """Ends everything in flight; its items stay unconsumed."""
        for run in self._running.values():
            run.cancel()

    async def _run(self, number: int, task: Task, workers: asyncio.TaskGroup) -> None:
        episodes = await self._play(number, task)
        await self._durably(lambda: self._pool.put(number, episodes))
        self._finish(number)
        if not self._window.policy.holds:  # generation goes on, also while nobody takes
            self._evict(workers, None)
            self.fill(workers)

    async def _durably(self, call: Callable[[], T]) -> T:
        """What a call of the pool gives, made again while the store is away. Raises UserError at
        once where the store refuses."""
        began, wait, away = time.monotonic(), FIRST_WAIT, False
        try:
            while True:
                try:
                    return await asyncio.to_thread(call)
                except StoreRefused as error:  # which waiting does not mend
                    raise UserError(f"pool={self._pool.location}: {error}") from error
                except StoreUnavailable as error:
                    seconds = time.monotonic() - began
                    if seconds + wait > self._patience:
                        raise
                    logger.warning("the pool is away for %.0f s: %s", seconds, error)
                    self.pool_retries += 1
                    self._away += not away
                    away = True
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
        finally:
            self._away -= away

    def _finish(self, number: int) -> None:
        self._window.finish(number)
        self._changed.set()

    def state(self) -> dict[str, Any]:
        """The cursors as plain JSON: window, source, and the tasks in flight."""
        return {
            "window": self._window.state(),
            "source": self._source.state(),
            "tasks": {str(n): dataclasses.asdict(task) for n, task in self._tasks.items()},
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Continues from `state`, taken after update `version`.

        The pool may hold more than the state knows: groups that only weights up to
        `version` sampled are used as they are, all others are deleted and played again,
        and so is a finished group that the pool has lost. Raises UserError if the state
        does not fit this run.
        """
        self._tasks = {int(n): Task(**task) for n, task in state["tasks"].items()}
        coming = state["window"]["admitted"]
        unconsumed = [n for n in self._pool.items() if n in self._tasks or n >= coming]
        usable = {n for n in unconsumed if self._usable(n, version)}
        self._pool.delete(set(unconsumed) - usable)
        finished, running = state["window"]["finished"], state["window"]["running"]
        kept = [pair for pair in finished if pair[0] in usable]
        lost = [pair for pair in finished if pair[0] not in usable]
        self._window.restore(
            {**state["window"], "finished": kept, "running": sorted(running + lost)}
        )
        self._source.restore(state["source"])
        self._stored = usable - set(self._window.finished)

    def _usable(self, number: int, version: int) -> bool:
        try:
            return newest(self._pool.get(number)) <= version
        except CorruptObject:
            return False


def newest(episodes: Sequence[Episode]) -> int:
    """The newest weight version that sampled any token of a group; 0 if none did."""
    versions = [int(t.versions.max()) for e in episodes for t in e.turns if len(t.versions)]
    return max(versions, default=0)
