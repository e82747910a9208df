"""Several domains in one step: a queue each, and shares of what every update consumes.

Events flow in as for one queue, (lane, number) pairs flow out. The invariant: every batch takes
its quota of every lane, however fast the lanes are; quotas are those of `sched.shares`, in items or
in sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_jax.config import UserError, check
from forge_jax.sched.policies import Policy
from forge_jax.sched.queue import Deadline, Queue
from forge_jax.sched.saved_queue import check_state
from forge_jax.sched.shares import ItemShares, Shares, TokenShares
from forge_jax.sched.stages import Stage, StagedShares
from forge_jax.sched.watch import Evicted

KEYS = ("left", "queues", "shares", "trained")


@dataclass(frozen=True, kw_only=True)
class LaneConfig:
    """A domain's own queue: its N, W and bound."""

    name: str
    policy: Policy
    share: float = 1.0  # of what an update consumes
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, f"share={self.share} must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a lane has given to training so far."""

    items: int = 0
    tokens: int = 0  # sampled


class Lanes:
    """Queues side by side, whose items are consumed in fixed shares."""

    def __init__(
        self,
        lanes: Sequence[LaneConfig],
        *,
        batch: int,
        ahead: int = 0,
        tokens: bool = False,
        exact: bool = False,
        spare: int = 0,
        stages: Sequence[Stage] = (),
    ):
        """With `tokens` shares are of sampled tokens, else of items; with `stages` they are those
        of one stage after the other. With `exact` no more is
        admitted than the batch at hand lacks, so that nothing is left over for the next one.
        `spare`: items of a lane that a batch may consume beyond its quota (`again`).

        Raises UserError unless shares add up to 1, and each is worth an item an update where they
        are of items.
        """
        if not lanes or abs(sum(lane.share for lane in lanes) - 1) > 1e-9:
            shares = [lane.share for lane in lanes]
            raise UserError(f"the shares {shares} of the lanes must add up to 1")
        self.names = tuple(lane.name for lane in lanes)
        if len(set(self.names)) < len(self.names):
            raise UserError(f"the lanes {list(self.names)} must have different names")
        self.batch, self.exact = batch, exact
        shares = [lane.share for lane in lanes]
        self._shares: Shares
        if stages:
            self._shares = StagedShares(self.names, stages, batch)
        elif tokens:
            self._shares = TokenShares(shares, batch)
        else:
            self._shares = ItemShares(self.names, shares, batch)
        least = self._shares.least
        beyond = batch - sum(least) + spare  # the quota that is the same in every batch
        self.queues = tuple(
            Queue(lane.policy, batch=n, most=n + beyond, ahead=ahead, deadline=lane.deadline)
            for lane, n in zip(lanes, least, strict=True)
        )
        self.trained = [Trained() for _ in lanes]
        self.left: list[int] = []  # of each lane, to be consumed for the batch at hand
        self.next_batch()

    @property
    def lag_bound(self) -> int | None:
        """The largest lag, in items of its own lane, of any; None: some lane has no bound."""
        bounds = [queue.lag_bound for queue in self.queues]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    def next_batch(self) -> None:
        """Sets the quotas of the next batch."""
        self.left = self._shares.quotas()

    def admit(self, lane: int) -> int | None:
        """The number of the next item of a lane, or None while it has no place."""
        queue = self.queues[lane]
        wanted = self.left[lane] + (0 if self.exact else self._shares.coming(lane))
        return queue.admit() if queue.in_service + queue.waiting < wanted else None

    def take(self) -> tuple[int, int] | None:
        """Consumes an item of the lane with the most left to give; None if no lane has one."""
        for lane in sorted(range(len(self.left)), key=lambda lane: -self.left[lane]):
            if not self.left[lane]:
                break
            if (number := self.queues[lane].take()) is not None:
                self.left[lane] -= 1
                return lane, number
        return None

    def evict(self, lane: int, now: float | None) -> list[Evicted]:
        """Gives up what the policy of a lane drops and, `now` being a time in seconds, what its
        deadline does: from then on its head is waited for, if the batch at hand lacks items of the
        lane. None: the policy alone."""
        queue = self.queues[lane]
        if now is not None and not self.left[lane]:
            queue.rest(now)
            now = None
        return queue.evict(now)

    def rest(self, now: float) -> None:
        """Nobody waits for the head of any lane, until `evict` is told a time."""
        for queue in self.queues:
            queue.rest(now)

    def again(self, lane: int) -> None:
        """The item taken last gives nothing: another of its lane is to take its place."""
        self.left[lane] += 1

    def count(self, lane: int, tokens: int) -> None:
        """An item that was taken is trained on, with so many sampled tokens."""
        before = self.trained[lane]
        self.trained[lane] = Trained(items=before.items + 1, tokens=before.tokens + tokens)
        self._shares.count(lane, tokens)

    def update(self) -> None:
        """One more update is complete, for every lane."""
        for queue in self.queues:
            queue.update()

    def state(self) -> dict[str, Any]:
        """Plain JSON; a restored one continues exactly."""
        return {
            "left": list(self.left),
            "queues": {n: q.state() for n, q in zip(self.names, self.queues, strict=True)},
            "shares": self._shares.state(),
            "trained": [[lane.items, lane.tokens] for lane in self.trained],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`; UserError, and nothing changed, where it does not fit."""
        if sorted(state) != sorted(KEYS):
            raise UserError(f"saved lanes: keys are {sorted(state)}, not {sorted(KEYS)}")
        if list(state["queues"]) != list(self.names):
            raise UserError(f"saved lanes: {list(state['queues'])}, not {list(self.names)}")
        left, trained = state["left"], state["trained"]
        fine = len(left) == len(self.names) == len(trained)
        if not (fine and all(0 <= n <= self.batch for n in left) and sum(left) <= self.batch):
            raise UserError(f"saved lanes: {left=} must be a quota of each lane, with {trained=}")
        for name, queue in zip(self.names, self.queues, strict=True):
            check_state(state["queues"][name], queue.policy)
        self._shares.restore(state["shares"])
        for name, queue in zip(self.names, self.queues, strict=True):
            queue.restore(state["queues"][name])
        self.left = list(left)
        self.trained = [Trained(items=items, tokens=tokens) for items, tokens in trained]
