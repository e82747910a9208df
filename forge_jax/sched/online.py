"""Tunes the window of a queue while it runs: measures what ends, picks again now and then.

Measured items and completed updates flow in, new sizes with their reasons flow out. The invariant:
sizes change at most once in `every` updates, and only for others that are predicted to be better.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.config import UserError, check
from forge_jax.sched.instances import FleetConfig
from forge_jax.sched.latency import Items
from forge_jax.sched.policies import Window
from forge_jax.sched.queue import Deadline
from forge_jax.sched.tuner import TuneConfig, tune


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """When to tune, and from how much."""

    tune: TuneConfig
    every: int = 50  # updates
    memory: int = 2000  # items that ended last
    least: int = 100  # items to have measured before the first time

    def __post_init__(self) -> None:
        check(self.every >= 1, f"every={self.every} must be at least 1")
        check(self.least >= 2, f"least={self.least} must be at least 2")
        check(self.memory >= self.least, f"memory={self.memory} < least={self.least}")


@dataclass(frozen=True, kw_only=True)
class Retuned:
    """What came of one look at the latencies."""

    updates: int  # completed by then
    window: Window | None  # adopted; None: what was there stays
    reasons: tuple[str, ...]


class Tuner:
    """Holds the latencies of what ended last. What hangs never ends, and is not measured."""

    def __init__(
        self,
        cfg: OnlineConfig,
        *,
        batch: int,
        fleet: FleetConfig | None = None,
        deadline: Deadline | None = None,
    ):
        """`deadline`: of the queue's head."""
        self.cfg, self.batch, self.fleet, self.deadline = cfg, batch, fleet, deadline
        self.updates = 0
        self.log: list[Retuned] = []
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=cfg.memory)

    def observe(self, compute: float, tool: float, length: float) -> None:
        """An item has ended, after so many seconds of computing and of tools, with so many
        tokens."""
        self._measured.append((compute, tool, length))

    def updated(self, train_seconds: float, current: tuple[int, int]) -> Window | None:
        """One more update is complete, it took `train_seconds`; the window to adopt in place of
        the `current` N and W, if another is better and it is time."""
        self.updates += 1
        if self.updates % self.cfg.every or len(self._measured) < self.cfg.least:
            return None
        window = None
        try:
            tuned = tune(
                self._items(),
                batch=self.batch,
                train_seconds=train_seconds,
                cfg=self.cfg.tune,
                fleet=self.fleet,
                deadline=self.deadline,
                current=current,
            )
            reasons = tuned.reasons
            if (tuned.in_flight, tuned.window) != current:
                window = Window(in_flight=tuned.in_flight, window=tuned.window)
        except UserError as error:  # no window keeps the budgets on what was measured
            reasons = (str(error),)
        self.log.append(Retuned(updates=self.updates, window=window, reasons=reasons))
        return window

    def state(self) -> dict[str, Any]:
        """Plain JSON, without the log; a restored tuner picks as this one would."""
        return {"updates": self.updates, "measured": [list(row) for row in self._measured]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`; UserError where it is not one."""
        if sorted(state) != ["measured", "updates"]:
            raise UserError(f"saved tuner: keys are {sorted(state)}, not measured, updates")
        rows = state["measured"]
        if not all(isinstance(row, list) and len(row) == 3 for row in rows):
            raise UserError("saved tuner: measured must hold three numbers an item")
        self.updates = state["updates"]
        self._measured = deque(((c, t, n) for c, t, n in rows), maxlen=self.cfg.memory)

    def _items(self) -> Items:
        compute, tool, length = np.array(self._measured, np.float64).T
        domain = np.zeros(len(compute), np.int64)
        return Items(compute=compute, tool=tool, length=length, domain=domain, names=("measured",))
