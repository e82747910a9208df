"""Tunes the window of one queue of a run, from what its own items took.

Played groups and the seconds of updates flow in, the queue gets another window now and then, and a
step's row says which and why. The invariant: every window adopted keeps the lag budget by its
bound; a resumed run has the window that it had.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.config import UserError
from forge_jax.sched.latency import measured
from forge_jax.sched.online import Tuner
from forge_jax.sched.policies import Window
from forge_jax.sched.queue import Queue
from forge_jax.types import Episode

logger = logging.getLogger(__name__)


class Tuning:
    """One queue and its tuner. Predictions are made in a thread while agents go on."""

    def __init__(self, queue: Queue, tuner: Tuner):
        self._queue, self._tuner = queue, tuner
        self._ended: list[tuple[float, float, float]] = []  # since the last update

    def ended(self, group: Sequence[Episode]) -> None:
        """A group has been played. One without a call has nothing to measure."""
        row = measured(group)
        if row is not None:
            self._ended.append(row[:3])

    async def updated(self, seconds: float) -> dict[str, Any]:
        """One more update is complete and took so many seconds: adopts another window where that
        is better. N, W, and `tuned`, the reasons, where it was looked into."""
        self._tell()
        looks, before = len(self._tuner.log), self._sizes()
        window = await asyncio.to_thread(self._tuner.updated, seconds, before)
        if window is not None:
            self._queue.adopt(window)
        places, width = self._sizes()
        row: dict[str, Any] = {"in_flight": places, "window": width}
        for look in self._tuner.log[looks:]:
            logger.info("N, W: %s, were %s: %s", (places, width), before, "; ".join(look.reasons))
            row["tuned"] = list(look.reasons)
        return row

    def state(self) -> dict[str, Any]:
        """Plain JSON: what was measured, and the sizes that hold."""
        self._tell()
        return {"tuner": self._tuner.state(), "sizes": list(self._sizes())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`, UserError where it is none. The queue is empty still, and
        is restored next."""
        if sorted(state) != ["sizes", "tuner"]:
            raise UserError(f"saved tuning: keys are {sorted(state)}, not sizes, tuner")
        self._tuner.restore(state["tuner"])
        places, width = state["sizes"]
        self._queue.adopt(Window(in_flight=places, window=width))

    def _tell(self) -> None:
        for row in self._ended:
            self._tuner.observe(*row)
        self._ended.clear()

    def _sizes(self) -> tuple[int, int]:
        policy = self._queue.policy
        assert isinstance(policy, Window)
        assert policy.window is not None
        return policy.in_flight, policy.window


async def retune(tunings: Sequence[Tuning], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """`Tuning.updated` of every lane, under names that end in the lane's where there are more."""
    row: dict[str, Any] = {}
    for tuning, name in zip(tunings, names, strict=bool(tunings)):
        found = await tuning.updated(seconds)
        end = f"_{name}" if len(names) > 1 else ""
        row |= {key + end: value for key, value in found.items()}
    return row
