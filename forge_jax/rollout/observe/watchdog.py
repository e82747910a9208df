"""A watchdog over an engine: when requests run and nothing moves, it tells where everybody is.

Watched requests flow in; a report flows out once for each time that everything stands still.
It only looks: what hangs is left as it is. A thread of its own looks, so that an event loop
that hangs is seen too.
"""

import faulthandler
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TextIO

from forge_jax.rollout.observe.watched import Seen
from forge_jax.types import Chunk


class Watchdog:
    """An `Observer` that reports to `file`, which must have a descriptor; a context manager."""

    def __init__(self, seconds: float, stats: Callable[[], Mapping[str, float]], file: TextIO):
        """Nothing moves when requests run and none got tokens or ended for `seconds`."""
        self.reports = 0
        self._seconds = seconds
        self._stats = stats
        self._file = file
        self._running: dict[int, Seen] = {}
        self._moved = time.monotonic()
        self._reported = False  # since something moved
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()
        self._thread.join()

    def began(self, seen: Seen) -> None:
        # A request that comes moves nothing; but the first one starts the clock.
        if not self._running:
            self._move()
        self._running[seen.number] = seen

    def told(self, seen: Seen, chunk: Chunk, gap: float | None) -> None:
        self._move()

    def ended(self, seen: Seen) -> None:
        del self._running[seen.number]
        self._move()

    def _move(self) -> None:
        self._moved, self._reported = time.monotonic(), False

    def _look(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            still = time.monotonic() - self._moved
            if self._running and still >= self._seconds and not self._reported:
                self._reported = True
                self._report(still)

    def _report(self, still: float) -> None:
        now = time.monotonic()
        running = list(self._running.copy().values())
        told = {
            "time": time.time(),
            "event": "watchdog",
            "seconds_still": still,
            "requests": [asdict(seen) | {"seconds": now - seen.arrived} for seen in running],
            "stats": dict(self._stats()),
        }
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self.reports += 1
