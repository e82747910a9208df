"""The generation queue: in which order finished items are consumed, under some policy.

Events flow in (an item is admitted, has finished, is asked for; an update is complete), item
numbers flow out. The invariant: every number ends exactly once, consumed or given up; nothing past
the policy's reach is taken; and no consumed item is later than the policy's bounds, which is
asserted at every consumption. Payloads live elsewhere; no clock, no thread, no I/O.
"""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Mapping
from typing import Any

from forge_jax.config import check
from forge_jax.sched.policies import Bounds, Policy, Why, Window, as_plain, updates_of
from forge_jax.sched.policies import Deadline as Deadline
from forge_jax.sched.saved_queue import Change, check_state
from forge_jax.sched.watch import Evicted, Watch

Entry = tuple[int, int]  # items consumed and updates complete when an item was admitted


class Queue:
    """Items 0, 1, 2, ... from admission to their end, as a state machine.

    Whoever calls `take` calls `evict` first. An item without anything to train on (expired in its
    own time, failed) finishes and is taken like any other. Events at one instant are told in order
    of number. Whoever wants places to free only after a training step calls `admit` only after it.

    The lag of an item is how many items were consumed between its admission and its own
    consumption; in updates, how many were complete.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch: int,
        most: int | None = None,
        ahead: int = 0,
        deadline: Deadline | None = None,
    ):
        """`batch`: P, items an update, or the fewest where they vary up to `most`; `ahead`: batches
        chosen while another one trains."""
        check(batch >= 0, f"{batch=} must be >= 0")
        check(batch >= 1 if most is None else most >= max(1, batch), f"{batch=} and {most=}: none")
        check(ahead >= 0, f"{ahead=} must be >= 0")
        self.policy = policy
        self.deadline = deadline
        self.batch, self.most, self.batches_ahead = batch, most, ahead
        self.bounds: Bounds | None = policy.bounds(batch, ahead, most)
        self.admitted = 0  # the next number to admit
        self.head = 0
        self.consumed = 0
        self.version = 0  # updates complete
        self.last_lag = 0  # of the item taken last, in items
        self.last_updates = 0  # ... in updates
        self.evicted = dict.fromkeys(Why, 0)
        self._ahead: set[int] = set()  # numbers past the head that have ended
        self._running: dict[int, Entry] = {}
        self._finished: dict[int, Entry] = {}  # in the order they finished
        self._again: set[int] = set()  # numbers of items that were requeued
        self._edges: list[tuple[int, int]] = []  # (version, last number admitted in it)
        self._change: Change | None = None
        self._rank = 0  # of the next finish
        self._eligible: list[tuple[int, int]] = []  # heap of (rank, number)
        self._blocked: list[tuple[int, int]] = []  # heap of (number, rank)
        self._watch = Watch()

    @property
    def lag_bound(self) -> int | None:
        """The largest lag in items that any order of finishing brings about; None: no bound."""
        return None if self.bounds is None else self.bounds.items

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers admitted and not finished, in order: after a restore, to be run again."""
        return tuple(self._running)

    @property
    def finished(self) -> tuple[int, ...]:
        """Numbers finished and not consumed, in the order they finished."""
        return tuple(self._finished)

    @property
    def in_service(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._finished)

    @property
    def due(self) -> float:
        """When the deadline of the head is over, if it goes on being waited for; inf: never."""
        if self.deadline is None:
            return math.inf
        return self._watch.due(self.head, self.deadline.seconds)

    def head_version(self) -> int:
        """Updates complete when the head was admitted; all of them where it is not yet."""
        entry = self._running.get(self.head) or self._finished.get(self.head)
        return self.version if entry is None else entry[1]

    def last_of(self, version: int) -> float:
        """The largest number admitted by the end of `version`; inf while it has not ended."""
        if version >= self.version:
            return math.inf
        at = bisect.bisect_right(self._edges, (version, self.admitted))
        return self._edges[at - 1][1] if at else -1

    def first_finished(self) -> int:
        return next(iter(self._finished))

    def admit(self) -> int | None:
        """The number of the next item, or None while there is no place."""
        return self._open() if self.policy.admits(self) else None

    def finish(self, number: int) -> None:
        """Item `number` has ended. ValueError unless it was admitted and had not."""
        if number not in self._running:
            known = 0 <= number < self.admitted
            raise ValueError(f"{number=} {'has already finished' if known else 'is not admitted'}")
        self._finished[number] = self._running.pop(number)
        self._rank_finished(number)

    def take(self) -> int | None:
        """Consumes the item within reach that finished first; None if none has."""
        while self._eligible:
            _, number = heapq.heappop(self._eligible)
            if number in self._finished:  # else it was given up meanwhile
                break
        else:
            return None
        before, version = self._finished.pop(number)
        self.last_lag, self.last_updates = self.consumed - before, self.version - version
        if self.bounds is not None:
            told = f"{number=} has {self.last_lag=} {self.last_updates=}, past {self.bounds}"
            fine = self.last_lag <= self.bounds.items and self.last_updates <= self.bounds.updates
            assert fine, told
        self.consumed += 1
        self._end(number)
        return number

    def update(self) -> None:
        """One more update is complete."""
        self.version += 1

    def evict(self, now: float | None = 0.0) -> list[Evicted]:
        """Gives up what the policy or the deadline says; `now` is in seconds, and never falls.
        From then on the head is waited for, until `rest`. None: the policy alone."""
        gone = []
        while self.admitted > self.head and (number := self.policy.evicts(self)) is not None:
            gone.append(self._give_up(number, Why.DROPPED))
        if self.deadline is None or now is None:
            return gone
        while self.head in self._running:
            self._watch.wait(self.head, now)
            if now < self.due:
                break
            gone.append(self.expire(self.head))
        return gone

    def rest(self, now: float) -> None:
        """Nobody waits for the head any more: its deadline stands still."""
        self._watch.rest(now)

    def expire(self, number: int) -> Evicted:
        """Gives up a running item whose time is over: to be requeued the first time, where the
        deadline says so. ValueError unless it runs."""
        if number not in self._running:
            raise ValueError(f"{number=} does not run")
        again = self.deadline is not None and self.deadline.requeue and number not in self._again
        return self._give_up(number, Why.REQUEUED if again else Why.EXPIRED)

    def adopt(self, policy: Window) -> None:
        """Goes on under another window, in place of one. Raises ValueError for other policies.

        Until all that was admitted before has ended, the narrower of the windows rules, so that
        every item keeps the bound of the window that it was admitted under.
        """
        old = self.policy
        if not isinstance(old, Window) or old.window is None or policy.window is None:
            raise ValueError(f"{policy} cannot follow {old}: both must be bounded windows")
        before, bounds = self._change, self.bounds
        new = policy.bounds(self.batch, self.batches_ahead, self.most)
        assert bounds is not None
        assert new is not None
        self._change = Change(
            window=min(old.window if before is None else before.window, policy.window),
            places=max(old.in_flight if before is None else before.places, policy.in_flight),
            items=max(bounds.items, new.items),
            until=self.admitted - 1,
        )
        self.policy = policy
        self._moved()

    def state(self) -> dict[str, Any]:
        """Everything a resumed queue needs to continue exactly, as plain JSON.

        `running` and `finished` (in the order of finishing) hold a number, and the items consumed
        and updates complete at its admission. How long the head was waited for is not kept:
        what runs is run again, and waited for anew.
        """
        return {
            "policy": as_plain(self.policy),
            "admitted": self.admitted,
            "head": self.head,
            "consumed": self.consumed,
            "version": self.version,
            "ahead": sorted(self._ahead),
            "running": [[number, *entry] for number, entry in self._running.items()],
            "finished": [[number, *entry] for number, entry in self._finished.items()],
            "again": sorted(self._again),
            "edges": [list(edge) for edge in self._edges],
            "change": self._change and dataclasses.asdict(self._change),
            "evicted": {why.value: count for why, count in self.evicted.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`; UserError, and nothing changed, where it does not fit."""
        check_state(state, self.policy)
        for name in ("admitted", "head", "consumed", "version"):
            setattr(self, name, state[name])
        self._ahead, self._again = set(state["ahead"]), set(state["again"])
        self._running = {number: (b, v) for number, b, v in sorted(state["running"])}
        self._finished = {number: (b, v) for number, b, v in state["finished"]}
        self._edges = [(version, last) for version, last in state["edges"]]
        self.evicted = {why: state["evicted"][why.value] for why in Why}
        self._change = state["change"] and Change(**state["change"])
        self._set_bounds()
        self._rank, self._eligible, self._blocked, self._watch = 0, [], [], Watch()
        for number in self._finished:
            self._rank_finished(number)

    def _open(self) -> int:
        number = self.admitted
        self.admitted += 1
        self._running[number] = (self.consumed, self.version)
        if self._edges and self._edges[-1][0] == self.version:
            self._edges[-1] = (self.version, number)
        else:
            self._edges.append((self.version, number))
        return number

    def _give_up(self, number: int, why: Why) -> Evicted:
        self._running.pop(number, None)
        self._finished.pop(number, None)
        self.evicted[why] += 1
        self._end(number)
        again = None
        if why is Why.REQUEUED:
            again = self._open()
            self._again.add(again)
        return Evicted(number=number, why=why, again=again)

    def _end(self, number: int) -> None:
        """`number` holds no place from now on; the head moves on where it was the head."""
        self._again.discard(number)
        self._ahead.add(number)
        while self.head in self._ahead:
            self._ahead.remove(self.head)
            self.head += 1
        while len(self._edges) > 1 and self._edges[0][1] < self.head:
            self._edges.pop(0)
        self._moved()

    def _moved(self) -> None:
        """Lets in what is within reach now, after the head or the policy has changed."""
        if self._change is not None:
            if self.head > self._change.until:
                self._change = None
            self._set_bounds()
        while self._blocked and self._blocked[0][0] <= self._reach():
            unblocked, rank = heapq.heappop(self._blocked)
            heapq.heappush(self._eligible, (rank, unblocked))

    def _reach(self) -> float:
        reach = self.policy.reach(self)
        return reach if self._change is None else min(reach, self.head + self._change.window)

    def _set_bounds(self) -> None:
        self.bounds = self.policy.bounds(self.batch, self.batches_ahead, self.most)
        if self._change is not None:
            items = self._change.items
            updates = updates_of(items, self.batch, self.batches_ahead)
            self.bounds = Bounds(items=items, updates=updates)

    def _rank_finished(self, number: int) -> None:
        if number <= self._reach():
            heapq.heappush(self._eligible, (self._rank, number))
        else:
            heapq.heappush(self._blocked, (number, self._rank))
        self._rank += 1
