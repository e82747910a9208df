"""Tells when the event loop did not get its turn, and who had it.

Everything of a run but the device shares one loop, so a tool or verifier that blocks it holds up
every episode. The loop's beats flow in, a count and lines of the log come out; each time is told
once, while it lasts where the interpreter is free to tell it.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

FRAMES = 4  # innermost ones of what blocks the loop that are told


class Watchdog:
    """Counts the times that the running loop was blocked for more than `seconds`."""

    def __init__(self, seconds: float):
        self.blocked = 0
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()  # that the loop runs in
        self._over = threading.Event()
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """One turn of the loop, and the next one is asked for."""
        self._beaten = time.monotonic()
        if not self._over.is_set():
            self._loop.call_later(self._seconds / 4, self.beat)

    def watch(self) -> None:
        """Runs in a thread of its own until `end`."""
        told, looked = False, time.monotonic()
        while not self._over.wait(self._seconds / 4):
            now = time.monotonic()
            if now - self._beaten <= self._seconds:
                told = False
            elif not told:
                told = True
                self.blocked += 1
                self._tell(now - self._beaten, still=now - looked > self._seconds)
            looked = now

    def end(self) -> None:
        self._over.set()

    def _tell(self, seconds: float, still: bool) -> None:
        if still:  # this thread had no turn either
            logger.warning(
                "nothing ran for %.1f s: the process was stopped, or a call held its interpreter",
                seconds,
            )
            return
        stack = traceback.extract_stack(sys._current_frames()[self._thread])[-FRAMES:]
        places = " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(stack))
        logger.warning("the event loop has been blocked for %.1f s by %s", seconds, places)


@asynccontextmanager
async def watching(seconds: float = 1.0) -> AsyncIterator[Watchdog]:
    """Watches the running loop while the block runs."""
    watchdog = Watchdog(seconds)
    thread = threading.Thread(target=watchdog.watch, name="watchdog", daemon=True)
    watchdog.beat()
    thread.start()
    try:
        yield watchdog
    finally:
        watchdog.end()
