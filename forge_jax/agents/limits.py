"""How long a world may take: a tool, a verifier.

An agent is written without knowing the run that it is played in, so the limits of the run reach
its worlds through the context of the episode's task. The invariant: what takes too long is the
world's fault and costs its own episode.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from forge_jax.agents.faults import EnvironmentFault, environment


@dataclass(frozen=True, kw_only=True)
class WorldLimits:
    """Seconds, None without a limit but that of the episode."""

    tool: float | None = None  # of a call of a tool
    verify: float | None = None  # of scoring an answer


UNLIMITED = WorldLimits()
LIMITS: ContextVar[WorldLimits] = ContextVar("LIMITS", default=UNLIMITED)  # of this episode


@asynccontextmanager
async def limited(stage: str, seconds: float | None) -> AsyncIterator[None]:
    """As `environment`, around what may take so long. It has to wait in coroutines: what blocks
    the event loop instead cannot be ended, see `verifiers`."""
    with environment(stage):
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise EnvironmentFault(f"{stage}: no end after {seconds:g} s") from None
            raise
