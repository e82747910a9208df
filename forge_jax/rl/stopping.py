"""How a signal ends a run that plays and trains: after the update that runs, not within it.

A first SIGTERM (a machine that is taken away) or SIGINT (Ctrl-C) asks to stop; a second one ends
the run at once, as either does before and after. The invariant: the handlers that were there
before are there afterwards.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[asyncio.Event]:
    """An event of the running loop that is set by the first signal within the block.

    Outside the main thread, which alone handles signals, nobody sets it.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def asked(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        logger.warning("stopping after this update; a second signal ends the run at once")
        loop.call_soon_threadsafe(stop.set)

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as of a run that was begun in the background
                signal.signal(number, asked)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` comes to; None if `stop` is set first, and `work` is cancelled then."""
    if stop.is_set():
        work.close()
        return None
    running, told = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        told.cancel()
        running.cancel()
        await asyncio.wait({running, told})
