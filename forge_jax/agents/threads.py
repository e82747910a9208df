"""Runs what computes in a world beside the event loop, each call in a thread of its own.

Functions and arguments flow in, results flow out. Nobody can end a thread: one that goes on after
its call was given up is left behind. The invariants: a call that computes, or hangs, takes no turn
of the loop and no thread of anybody else; those left behind are counted, and few.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from forge_jax.agents.faults import EnvironmentFault
from forge_jax.config import UserError

T = TypeVar("T")
MOST_LEFT = 16  # threads that may go on for nobody: all of them share one interpreter with the run


class Threads:
    """Those that worlds of a run compute in."""

    def __init__(self) -> None:
        self.left = 0  # behind, so far
        self._going_on: list[threading.Thread] = []  # of those

    async def call(self, call: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
        """What ``call(*arguments)`` comes to; a coroutine waits in the loop, and all else computes
        in a thread. Cancelled, it leaves the thread behind."""
        if inspect.iscoroutinefunction(call):
            return await call(*arguments)
        loop = asyncio.get_running_loop()
        told: asyncio.Future[T | Awaitable[T]] = loop.create_future()
        context = contextvars.copy_context()

        def end(tell: Callable[[], None]) -> None:
            if not told.done():
                tell()

        def compute() -> None:
            try:
                tell = functools.partial(told.set_result, context.run(call, *arguments))
            except BaseException as error:
                # An exit, or the end of an iterator, would mean something else to the loop.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                fault = error if plain else EnvironmentFault(f"{type(error).__name__}: {error}")
                tell = functools.partial(told.set_exception, fault)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, tell)

        thread = threading.Thread(target=compute, name="world", daemon=True)
        thread.start()
        try:
            result = await told
        except asyncio.CancelledError:
            self.left += 1
            self._going_on.append(thread)
            raise
        return await result if inspect.isawaitable(result) else result

    def check(self) -> None:
        """Raises UserError where more of them go on than there may be."""
        self._going_on = [thread for thread in self._going_on if thread.is_alive()]
        if len(self._going_on) > MOST_LEFT:
            raise UserError(
                f"{len(self._going_on)} calls of tools or verifiers go on in threads after their "
                f"time was over, more than {MOST_LEFT}: they do not end, and nobody can end them"
            )
