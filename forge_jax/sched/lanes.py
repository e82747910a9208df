"""Several domains in one step: a queue each, and shares of what every update consumes.

Events flow in as for one queue, (lane, number) pairs flow out. The invariant: every update takes
its quota of every lane, however fast the lanes are; quotas are whole, at least the share rounded
down, and add up to the batch, and over any number of updates a lane is within one item a lane of
its share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_jax.config import UserError, check
from forge_jax.sched.policies import Policy
from forge_jax.sched.queue import Deadline, Queue
from forge_jax.sched.saved_queue import check_state


@dataclass(frozen=True, kw_only=True)
class LaneConfig:
    """A domain's own queue: its N, W and bound."""

    name: str
    policy: Policy
    share: float = 1.0  # of the items an update consumes
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, f"share={self.share} must be in (0, 1]")


class Lanes:
    """Queues side by side, whose items are consumed in fixed shares."""

    def __init__(self, lanes: Sequence[LaneConfig], *, batch: int, ahead: int = 0):
        """Raises UserError unless shares add up to 1 and each is worth an item an update."""
        if not lanes or abs(sum(lane.share for lane in lanes) - 1) > 1e-9:
            shares = [lane.share for lane in lanes]
            raise UserError(f"the shares {shares} of the lanes must add up to 1")
        self.names = tuple(lane.name for lane in lanes)
        if len(set(self.names)) < len(self.names):
            raise UserError(f"the lanes {list(self.names)} must have different names")
        self.batch = batch
        self._least = [math.floor(lane.share * batch + 1e-9) for lane in lanes]
        for lane, least in zip(lanes, self._least, strict=True):
            if least < 1:
                raise UserError(f"{lane.name}: share={lane.share} of {batch=} is less than an item")
        self._due = [
            lane.share * batch - least for lane, least in zip(lanes, self._least, strict=True)
        ]
        self._credit = [0.0] * len(lanes)
        self.queues = tuple(
            Queue(lane.policy, batch=least, ahead=ahead, deadline=lane.deadline)
            for lane, least in zip(lanes, self._least, strict=True)
        )
        self.left: list[int] = []  # of each lane, to be consumed for the batch at hand
        self.next_batch()

    def next_batch(self) -> None:
        """Sets the quotas of the next batch."""
        self._credit = [c + d for c, d in zip(self._credit, self._due, strict=True)]
        self.left = list(self._least)
        for _ in range(self.batch - sum(self._least)):
            most = max(range(len(self.left)), key=lambda lane: (self._credit[lane], -lane))
            self._credit[most] -= 1
            self.left[most] += 1

    def take(self) -> tuple[int, int] | None:
        """Consumes an item of the lane with the most left to give; None if no lane has one."""
        for lane in sorted(range(len(self.left)), key=lambda lane: -self.left[lane]):
            if not self.left[lane]:
                break
            if (number := self.queues[lane].take()) is not None:
                self.left[lane] -= 1
                return lane, number
        return None

    def update(self) -> None:
        """One more update is complete, for every lane."""
        for queue in self.queues:
            queue.update()

    def state(self) -> dict[str, Any]:
        """Plain JSON; a restored one continues exactly."""
        return {
            "credit": list(self._credit),
            "left": list(self.left),
            "queues": {n: q.state() for n, q in zip(self.names, self.queues, strict=True)},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`; UserError, and nothing changed, where it does not fit."""
        if sorted(state) != ["credit", "left", "queues"]:
            raise UserError(f"saved lanes: keys are {sorted(state)}, not credit, left, queues")
        if list(state["queues"]) != list(self.names):
            raise UserError(f"saved lanes: {list(state['queues'])}, not {list(self.names)}")
        left = state["left"]
        fine = len(left) == len(self.names) == len(state["credit"])
        if not (fine and all(0 <= n <= self.batch for n in left) and sum(left) <= self.batch):
            raise UserError(f"saved lanes: {left=} must be a quota of each lane")
        for name, queue in zip(self.names, self.queues, strict=True):
            check_state(state["queues"][name], queue.policy)
        for name, queue in zip(self.names, self.queues, strict=True):
            queue.restore(state["queues"][name])
        self._credit, self.left = [float(c) for c in state["credit"]], list(left)
