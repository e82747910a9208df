"""Engines that serve many items at once, slower the more there are, and that fail.

Items are placed and removed at given times; flows out: when which compute ends. The invariant: an
item's compute ends when it has had exactly its seconds' worth of service, wherever others come and
go meanwhile; one that its instance loses begins again.

An instance with n items serves each at 1 / (1 + slowdown (n - 1)) of the speed it has alone.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from forge_jax.config import check


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """What generates; all instances are alike."""

    instances: int = 1
    slowdown: float = 0.0  # of an item by each other one on its instance; 0: none
    failure_seconds: float = math.inf  # mean time of an instance between failures
    repair_seconds: float = 0.0  # that a failed instance is away
    item_failures: float = 0.0  # share of items that end early, with nothing to train on
    hangs: float = 0.0  # share of items that never end by themselves

    def __post_init__(self) -> None:
        check(self.instances >= 1, f"instances={self.instances} must be at least 1")
        check(0 <= self.slowdown < math.inf, f"slowdown={self.slowdown} must be >= 0")
        check(self.failure_seconds > 0, f"failure_seconds={self.failure_seconds} must be > 0")
        fine = 0 <= self.repair_seconds < math.inf
        check(fine, f"repair_seconds={self.repair_seconds} must be a number >= 0")
        for name, share in (("item_failures", self.item_failures), ("hangs", self.hangs)):
            check(0 <= share <= 1, f"{name}={share} must be in [0, 1]")


class Instances:
    """Places items on the instance with the fewest, and tells when computing ends.

    Work is kept in virtual seconds: an instance's clock runs at the speed that its items have, so
    each item's end on that clock is known when it is placed and never changes.
    """

    def __init__(self, cfg: FleetConfig):
        count = cfg.instances
        self.cfg = cfg
        self.members: list[set[int]] = [set() for _ in range(count)]
        self.busy_seconds = 0.0  # summed over instances with an item
        self.lost = 0  # computations that a failure threw away
        self.homeless: list[tuple[int, float]] = []  # (item, seconds) while every instance is away
        self._up = [True] * count
        self._clock, self._told = [0.0] * count, [0.0] * count
        self._ends: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self._stamp = [0] * count
        self._home: dict[int, tuple[int, float, float]] = {}  # (instance, seconds, virtual end)
        self._free = [(0, i) for i in range(count)]  # heap of (members, instance), partly stale
        self.events: list[tuple[float, int, int]] = []  # (time, instance, stamp), to be collected

    def place(self, item: int, seconds: float, now: float) -> None:
        """Starts an item that needs `seconds` alone."""
        instance = self._least()
        if instance is None:
            self.homeless.append((item, seconds))
            return
        self._run_to(instance, now)
        end = self._clock[instance] + seconds
        self.members[instance].add(item)
        self._home[item] = (instance, seconds, end)
        heapq.heappush(self._ends[instance], (end, item))
        self._changed(instance, now)

    def remove(self, item: int, now: float) -> None:
        """Stops an item, if it is computing."""
        if item not in self._home:
            self.homeless = [pair for pair in self.homeless if pair[0] != item]
            return
        instance = self._home[item][0]
        self._run_to(instance, now)
        del self._home[item]
        self.members[instance].discard(item)
        self._changed(instance, now)

    def ended(self, instance: int, stamp: int, now: float) -> int | None:
        """The item whose computing ends with this event; None if the event is out of date."""
        if stamp != self._stamp[instance]:
            return None
        self._run_to(instance, now)
        end, item = heapq.heappop(self._ends[instance])
        self._clock[instance] = end  # exactly, whatever was rounded on the way
        del self._home[item]
        self.members[instance].discard(item)
        self._changed(instance, now)
        return item

    def fail(self, instance: int, now: float) -> None:
        """The instance is away; its items begin again elsewhere."""
        self._run_to(instance, now)
        self._up[instance] = False
        gone = sorted(self.members[instance])
        self.members[instance].clear()
        self._ends[instance].clear()
        self._stamp[instance] += 1
        self.lost += len(gone)
        for item in gone:
            self.place(item, self._home.pop(item)[1], now)

    def repair(self, instance: int, now: float) -> None:
        """The instance is back, empty."""
        self._told[instance], self._up[instance] = now, True
        heapq.heappush(self._free, (0, instance))
        waiting, self.homeless = self.homeless, []
        for item, seconds in waiting:
            self.place(item, seconds, now)

    def settle(self, now: float) -> None:
        """Brings `busy_seconds` up to date."""
        for instance in range(len(self.members)):
            self._run_to(instance, now)

    def _speed(self, instance: int) -> float:
        return 1 / (1 + self.cfg.slowdown * (len(self.members[instance]) - 1))

    def _run_to(self, instance: int, now: float) -> None:
        if self.members[instance]:
            passed = now - self._told[instance]
            self._clock[instance] += passed * self._speed(instance)
            self.busy_seconds += passed
        self._told[instance] = now

    def _changed(self, instance: int, now: float) -> None:
        """Tells anew when the next item of the instance ends."""
        ends, members = self._ends[instance], self.members[instance]
        while ends and self._home.get(ends[0][1], (-1, 0.0, 0.0))[::2] != (instance, ends[0][0]):
            heapq.heappop(ends)
        self._stamp[instance] += 1
        heapq.heappush(self._free, (len(members), instance))
        if len(self._free) > 8 * len(self._up) + 64:
            self._free = [(len(m), i) for i, m in enumerate(self.members) if self._up[i]]
            heapq.heapify(self._free)
        if ends:
            left = max(0.0, ends[0][0] - self._clock[instance]) / self._speed(instance)
            self.events.append((now + left, instance, self._stamp[instance]))

    def _least(self) -> int | None:
        while self._free:
            count, instance = self._free[0]
            if self._up[instance] and count == len(self.members[instance]):
                return instance
            heapq.heappop(self._free)
        return None


def faults(cfg: FleetConfig, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of `count` items: the share f64 of its compute after which each fails (1: it does not),
    and bool, whether it hangs."""
    fails = rng.random(count) < cfg.item_failures
    cut = np.where(fails, rng.random(count), 1.0)
    return cut, ~fails & (rng.random(count) < cfg.hangs)
