"""An engine whose requests are watched as they pass.

Requests and chunks flow through unchanged; what they looked like from outside flows to the
observers. Invariant: every request that is asked of the engine ends at every observer once.
"""

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from forge_jax.types import Chunk, Engine, Refused, Request


@dataclass(kw_only=True, eq=False)
class Seen:
    """One request so far. Moments are of time.monotonic()."""

    number: int  # of the request, from 0
    prompt: int  # tokens
    arrived: float
    output: int = 0  # tokens
    cached: int = 0  # tokens of the prompt read from a cache
    queued: float = 0.0  # seconds until its prefill began
    first: float | None = None  # moment of its first tokens
    last: float | None = None  # ... of its newest
    ended: float | None = None
    oldest: int | None = None  # versions of the weights that sampled it
    newest: int | None = None
    # stop | length | abort, as the engine says or for callers that went away; refused; failed
    finish: str = "abort"


class Observer(Protocol):
    """Whoever wants to know; called on the event loop, so it must be quick."""

    def began(self, seen: Seen) -> None: ...

    def told(self, seen: Seen, chunk: Chunk, gap: float | None) -> None:
        """`chunk` came, `gap` seconds after the tokens before it; None: it is the first."""
        ...

    def ended(self, seen: Seen) -> None: ...


class Watched:
    """`engine` as another `types.Engine`."""

    def __init__(self, engine: Engine, observers: Sequence[Observer]):
        self._engine = engine
        self._observers = tuple(observers)
        self._numbers = itertools.count()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields what the engine yields; see `types.Engine`."""
        seen = Seen(
            number=next(self._numbers), prompt=len(request.prompt), arrived=time.monotonic()
        )
        for observer in self._observers:
            observer.began(seen)
        try:
            chunks = cast("AsyncGenerator[Chunk, None]", self._engine.generate(request))
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._tell(seen, chunk)
                    yield chunk
        except Refused:
            seen.finish = "refused"
            raise
        except Exception:
            seen.finish = "failed"
            raise
        finally:
            seen.ended = time.monotonic()
            for observer in self._observers:
                observer.ended(seen)

    def _tell(self, seen: Seen, chunk: Chunk) -> None:
        now, before = time.monotonic(), seen.last
        if before is None:
            seen.first, seen.queued, seen.cached = now, chunk.queue_seconds, chunk.cached_tokens
        seen.last = now
        seen.output += len(chunk.ids)
        if len(chunk.versions):
            low, high = int(chunk.versions.min()), int(chunk.versions.max())
            seen.oldest = low if seen.oldest is None else min(seen.oldest, low)
            seen.newest = high if seen.newest is None else max(seen.newest, high)
        if chunk.finish is not None:
            seen.finish = str(chunk.finish)
        for observer in self._observers:
            observer.told(seen, chunk, None if before is None else now - before)
