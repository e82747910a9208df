"""Calls of a pool whose store may be away for a while.

Calls flow in, what they give flows out, as late as the store makes it. The invariant: a call is
made again until it is done, the store refuses, or patience is over; meanwhile others can see that
the store is away.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from forge_jax.config import UserError
from forge_jax.sched.answers import StoreRefused, StoreUnavailable
from forge_jax.sched.pool import Pool

logger = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between two tries at a store that is away


class Durable:
    """The calls of one pool."""

    def __init__(self, pool: Pool, patience: float, turned: Callable[[], None]):
        """`patience`: seconds that the store may be away before StoreUnavailable is raised.
        `turned` is called whenever the store goes away, or is back for all."""
        self._pool, self._patience, self._turned = pool, patience, turned
        self.retries = 0  # calls that were made again
        self._waiting = 0  # calls

    @property
    def away(self) -> bool:
        return self._waiting > 0

    async def call(self, call: Callable[[], T]) -> T:
        """What a call gives. Raises UserError at once where the store refuses."""
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
                    self.retries += 1
                    if not away:
                        away = True
                        self._waits(1)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
        finally:
            if away:
                self._waits(-1)

    def _waits(self, more: int) -> None:
        before = self.away
        self._waiting += more
        if self.away != before:
            self._turned()
