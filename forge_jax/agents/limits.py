"""How long a world may take: a tool, a verifier.

An agent is written without knowing the run that it is played in, so the limits of the run reach
its worlds through the context of the episode's task. The invariant: what takes too long is the
world's fault and costs its own episode.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forge_jax.agents.faults import EnvironmentFault, environment
from forge_jax.agents.threads import Threads

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorldLimits:
    """Seconds, None without a limit but that of the episode; and where worlds compute."""

    tool: float | None = None  # of a call of a tool
    verify: float | None = None  # of scoring an answer
    threads: Threads = field(default_factory=Threads)


UNLIMITED = WorldLimits()
LIMITS: ContextVar[WorldLimits] = ContextVar("LIMITS", default=UNLIMITED)  # of this episode


async def used(call: Callable[..., T | Awaitable[T]], name: str, *arguments: Any) -> T:
    """What a tool of a world does with `arguments`, within its time; `name` is the tool's."""
    limits = LIMITS.get()
    async with _limited(f"tool {name}", limits.tool):
        return await limits.threads.call(call, *arguments)


async def scored(call: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """What a verifier of a world says, within its time."""
    limits = LIMITS.get()
    async with _limited("score", limits.verify):
        return await limits.threads.call(call, *arguments)


@asynccontextmanager
async def _limited(stage: str, seconds: float | None) -> AsyncIterator[None]:
    """As `environment`, around what may take so long."""
    with environment(stage):
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise EnvironmentFault(f"{stage}: no end after {seconds:g} s") from None
            raise
