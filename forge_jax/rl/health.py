"""Keeps what serves up: begins it again after a fault, and has what it broke played again.

Faults of an engine flow in; a count of them, and results that none of them touched, come out. The
invariant: nothing that was played while the engine failed is taken for what an agent did.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WAIT, TRIES = 0.25, 4  # seconds before it serves again, doubling; faults in a row that end it
STEADY_SECONDS = 60.0  # of service, after which a fault is the first one in a row


class Health:
    """Whether an engine serves, and how often it has failed."""

    def __init__(self) -> None:
        self.failures = 0
        self.up = asyncio.Event()
        self.up.set()

    async def unbroken(self, play: Callable[[], Awaitable[T]]) -> T:
        """What `play` comes to, made again when the engine failed meanwhile."""
        while True:
            await self.up.wait()
            before = self.failures
            found = await play()
            if self.failures == before:
                return found


async def supervised(serve: Callable[[], Awaitable[None]], health: Health) -> None:
    """Serves, and again after each fault, `TRIES` in a row at most; raises the last of these."""
    wait, row = FIRST_WAIT, 0
    while True:
        began = time.monotonic()
        try:
            await serve()
        except Exception as error:
            if time.monotonic() - began > STEADY_SECONDS:
                wait, row = FIRST_WAIT, 0
            health.failures, row = health.failures + 1, row + 1
            health.up.clear()
            if row == TRIES:
                raise
            logger.warning("the engine failed, fault %d of %d in a row: %r", row, TRIES, error)
            await asyncio.sleep(wait)
            wait *= 2
            health.up.set()
