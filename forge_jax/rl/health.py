"""Keeps what serves up: begins it again after a fault, and has what it broke played again.

Faults of an engine flow in; a count of them, and results that none of them touched, come out. The
invariant: nothing that was played while the engine failed is taken for what an agent did.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forge_jax.restarts import Faults

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    """Serves, and again after each fault; raises the last of `restarts.TRIES` in a row."""
    faults = Faults()
    while True:
        began = time.monotonic()
        try:
            await serve()
        except Exception as error:
            health.failures += 1
            health.up.clear()
            wait = faults.wait(time.monotonic() - began)
            if wait is None:
                raise
            logger.warning("the engine failed, %s: %r", faults, error)
            await asyncio.sleep(wait)
            health.up.set()
