"""What a simulated trainer is asked to do, what may steer it, and what came of it.

Frozen records and a protocol; nothing here computes. The invariant: arrays of one length are of the
same items in the same order.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forge_jax.config import check
from forge_jax.sched.policies import Why, Window


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How fast finished items are trained on, and for how long."""

    seconds: float  # of one update
    updates: int | None = None  # after which it ends; items come again from the first as needed
    # None: until all items have ended, each admitted once

    def __post_init__(self) -> None:
        check(0 <= self.seconds < math.inf, f"seconds={self.seconds} must be a number >= 0")
        check(self.updates is None or self.updates >= 1, f"updates={self.updates} must be >= 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """What came of it; unless it says otherwise, an array is of consumed items, in order."""

    item: np.ndarray  # i64[k], index into the items
    time: np.ndarray  # f64[k], seconds
    lag: np.ndarray  # i64[k], items consumed between admission and own consumption
    updates: np.ndarray  # i64[k], updates complete between them
    failed: np.ndarray  # bool[k], nothing to train on
    admitted: np.ndarray  # i64[a], items in order of admission
    evicted: np.ndarray  # i64[e], items given up for good
    counts: dict[Why, int]
    lost: int  # computations that a failing instance threw away
    makespan: float  # end of the last update
    trainer_idle: float  # share of the makespan spent neither training nor consuming
    place_idle: float  # mean share of the lanes' places not in service
    instance_idle: float  # mean share of the instances without an item computing


class Resizer(Protocol):
    """What may change a window while it runs; see `forge_jax.sched.online`."""

    def observe(self, compute: float, tool: float, length: float) -> None:
        """An item has ended, after these seconds and tokens."""

    def updated(self, train_seconds: float, current: tuple[int, int]) -> Window | None:
        """An update is complete; the window to adopt, or None to keep the current N and W."""
