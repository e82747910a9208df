"""A line of JSON for every request that ended.

Watched requests flow in, lines flow out to whatever takes them. Times are in seconds; a time
that never came is null.
"""

import json
import time
from collections.abc import Callable

from forge_jax.rollout.observe.watched import Seen
from forge_jax.types import Chunk


class RequestLog:
    """An `Observer` that writes."""

    def __init__(self, write: Callable[[str], object]):
        """`write` takes a line with its end."""
        self._write = write

    def began(self, seen: Seen) -> None:
        pass

    def told(self, seen: Seen, chunk: Chunk, gap: float | None) -> None:
        pass

    def ended(self, seen: Seen) -> None:
        first, last = (None if at is None else at - seen.arrived for at in (seen.first, seen.last))
        later = seen.output - 1
        line = {
            "time": time.time(),
            "event": "request",
            "number": seen.number,
            "finish": seen.finish,
            "prompt_tokens": seen.prompt,
            "cached_tokens": seen.cached,
            "output_tokens": seen.output,
            "queue_seconds": seen.queued,
            "ttft_seconds": first,
            "seconds": last,
            "seconds_per_token": (
                (last - first) / later if first is not None and last is not None and later > 0
                else None
            ),
            "versions": None if seen.oldest is None else [seen.oldest, seen.newest],
        }  # fmt: skip
        self._write(json.dumps(line) + "\n")
