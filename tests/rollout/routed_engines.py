"""Engines of a small model behind a router, and requests to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from small_engine import (
    PATIENCE,
    WIDE,
    Completion,
    ask,
    complete,
    idle_engine,
    prompt,
)

from forge_jax.config import RolloutConfig
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.router.live import Router, RouterConfig
from forge_jax.types import Request

SIZES = replace(WIDE, slots=8, context=64)
PAGE = SIZES.page


@asynccontextmanager
async def routed(
    cfg: RouterConfig = RouterConfig(),  # noqa: B008  (frozen)
    sizes: RolloutConfig = SIZES,
    serve: bool = True,
) -> AsyncIterator[tuple[Router, dict[str, RolloutEngine]]]:
    """A router over two engines; all requests of engines that live have ended at the end."""
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        engines = {name: await stack.enter_async_context(idle_engine(sizes)) for name in ("a", "b")}
        router = Router(engines, sizes, cfg)
        task = asyncio.create_task(router.serve())
        try:
            yield router, engines
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ExceptionGroup):
                await task
        for engine in engines.values():
            stats = engine.stats()
            assert stats["requests_running"] == stats["requests_waiting"] == 0


def requests(count: int) -> list[Request]:
    """Groups of four that share three pages; the odd ones bring no seed."""
    return [
        ask(
            np.concatenate([prompt(i // 4, 3 * PAGE), prompt(100 + i, 3)]),
            seed=None if i % 2 else i,
            max_tokens=6,
        )
        for i in range(count)
    ]


async def all_of(engine: Any, asked: list[Request]) -> list[Completion]:
    return await asyncio.gather(*(complete(engine, request) for request in asked))
