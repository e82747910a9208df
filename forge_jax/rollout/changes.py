"""Changes to a running engine: new weights and pauses, one at a time.

A mode of `config.UPDATES` flows in and says what becomes of the requests that run; chunks of those
that it aborts flow out. Invariant: a change is made between two rounds, with nothing planned
and not dispatched, and one that has begun goes on to its end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from forge_jax.config import check
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.types import Chunk


class Changes:
    """What changes an engine whose rounds hold `turn` from a plan to its dispatch.

    `wake` is set when there may be something to plan again; `send` takes the chunks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        turn: asyncio.Lock,
        wake: asyncio.Event,
        send: Callable[[Iterable[tuple[int, Chunk]]], None],
    ):
        self._scheduler = scheduler
        self._turn = turn
        self._wake = wake
        self._send = send
        self._changing = asyncio.Lock()
        self._moved = asyncio.Event()  # something has ended, or may have
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self) -> None:
        """Notes that a request may have ended."""
        self._moved.set()

    async def lasting(self, change: Coroutine[Any, Any, None]) -> None:
        """Runs a change to its end, even if whoever asked for it is cancelled."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    @asynccontextmanager
    async def between(self, mode: str) -> AsyncGenerator[None, None]:
        """A time between two rounds; what `mode` says is done to running requests at its end.

        Raises ValueError if they are to end while the engine is paused.
        """
        scheduler = self._scheduler
        async with self._changing:
            check(
                not (mode == "wait" and scheduler.paused and scheduler.running),
                f"update={mode!r} while the engine is paused with requests that run",
            )
            async with self._emptied(mode), self._turn:
                yield
                self._settle(mode)

    async def pause(self, mode: str) -> None:
        """Plans nothing more until `resume`."""
        async with self._changing, self._emptied(mode), self._turn:
            self._scheduler.paused = True
            self._settle(mode)

    def resume(self) -> None:
        """Goes on after a pause."""
        self._scheduler.paused = False
        self._wake.set()

    @asynccontextmanager
    async def _emptied(self, mode: str) -> AsyncGenerator[None, None]:
        """Where `mode` is "wait", a time in which no request runs and none is admitted."""
        scheduler = self._scheduler
        try:
            scheduler.admitting = mode != "wait"
            while mode == "wait" and scheduler.running:
                self._moved.clear()
                await self._moved.wait()
            yield
        finally:
            scheduler.admitting = True
            self._wake.set()

    def _settle(self, mode: str) -> None:
        if mode == "recompute":
            self._scheduler.retract()
        elif mode == "abort":
            self._send(self._scheduler.abort())
