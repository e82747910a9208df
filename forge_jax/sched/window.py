"""Windowed FIFO: in which order finished items of the generation queue are consumed.

Events flow in (an item is admitted, has finished, is asked for), item numbers flow
out. The invariant: nothing outside [H, H+W] is ever taken, where the head H is the
oldest number not yet consumed and moves only when its own item is consumed. Payloads
live elsewhere; no clock, no thread, no I/O.
"""

import heapq
import math
from collections.abc import Mapping
from typing import Any

from forge_jax.config import UserError


class WindowedFifo:
    """The generation queue as a state machine over item numbers 0, 1, 2, ...

    At most `in_flight` (N) items are running or finished but unconsumed. Of the
    finished ones within `window` (W) of the head, the one that finished first is taken
    first; W = 0 is strict FIFO and None is greedy, without a window.

    An item without anything to train on (expired, failed) finishes and is taken like
    any other, so that the head never sticks on it. Events at one instant are told in
    order of number. Whoever wants places to free only after a training step calls
    `admit` only after the step: consumed items are by then consumed for good.

    The lag of an item is how many items were consumed between its admission and its own
    consumption. Method: MiniMax, "Forge: Scalable Agent RL Framework and Algorithm"
    (2026), and arXiv 2605.26494, section 6.2.4.
    """

    def __init__(self, *, in_flight: int, window: int | None):
        if in_flight < 1:
            raise ValueError(f"{in_flight=} must be at least 1")
        if window is not None and window < 0:
            raise ValueError(f"{window=} must be >= 0, or None for greedy")
        self.in_flight = in_flight
        self.window = window
        self.admitted = 0  # the next number to admit
        self.head = 0
        self.last_lag = 0  # of the item taken last
        self._ahead: set[int] = set()  # consumed numbers past the head
        # Both map a number to how many items had been consumed at its admission.
        self._running: dict[int, int] = {}
        self._finished: dict[int, int] = {}  # in the order they finished
        self._rank = 0  # of the next finish
        self._eligible: list[tuple[int, int]] = []  # heap of (rank, number)
        self._blocked: list[tuple[int, int]] = []  # heap of (number, rank)

    @property
    def consumed(self) -> int:
        """How many items have been taken."""
        return self.head + len(self._ahead)

    @property
    def lag_bound(self) -> int | None:
        """The largest lag any order of finishing can bring about: N + W - 1; None for greedy."""
        return None if self.window is None else self.in_flight + self.window - 1

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers admitted and not finished, in order: after a restore, to be run again."""
        return tuple(self._running)

    @property
    def finished(self) -> tuple[int, ...]:
        """Numbers finished and not consumed, in the order they finished."""
        return tuple(self._finished)

    def admit(self) -> int | None:
        """The number of the next item, or None while all N places are taken."""
        if len(self._running) + len(self._finished) >= self.in_flight:
            return None
        number = self.admitted
        self.admitted += 1
        self._running[number] = self.consumed
        return number

    def finish(self, number: int) -> None:
        """Item `number` has ended. ValueError unless it was admitted and had not."""
        if number not in self._running:
            known = 0 <= number < self.admitted
            raise ValueError(f"{number=} {'has already finished' if known else 'is not admitted'}")
        self._finished[number] = self._running.pop(number)
        self._rank_finished(number)

    def take(self) -> int | None:
        """Consumes the item of the window that finished first; None if none has."""
        if not self._eligible:
            return None
        _, number = heapq.heappop(self._eligible)
        self.last_lag = self.consumed - self._finished.pop(number)
        self._ahead.add(number)
        while self.head in self._ahead:
            self._ahead.remove(self.head)
            self.head += 1
        while self._blocked and self._blocked[0][0] <= self._reach():
            unblocked, rank = heapq.heappop(self._blocked)
            heapq.heappush(self._eligible, (rank, unblocked))
        return number

    def state(self) -> dict[str, Any]:
        """Everything a resumed queue needs to continue exactly, as plain JSON.

        `running` and `finished` (in the order of finishing) hold pairs of a number and
        how many items had been consumed at its admission.
        """
        return {
            "in_flight": self.in_flight,
            "window": self.window,
            "admitted": self.admitted,
            "head": self.head,
            "ahead": sorted(self._ahead),
            "running": [list(pair) for pair in self._running.items()],
            "finished": [list(pair) for pair in self._finished.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`; UserError, and nothing changed, where it does not fit."""
        for name, own in (("in_flight", self.in_flight), ("window", self.window)):
            if name in state and state[name] != own:
                raise UserError(f"{name}={own}, but the saved queue has {name}={state[name]!r}")
        _check(state)
        self.admitted, self.head = state["admitted"], state["head"]
        self._ahead = set(state["ahead"])
        self._running = dict(sorted(state["running"]))
        self._finished = dict(state["finished"])
        self._rank, self._eligible, self._blocked = 0, [], []
        for number in self._finished:
            self._rank_finished(number)

    def _rank_finished(self, number: int) -> None:
        if number <= self._reach():
            heapq.heappush(self._eligible, (self._rank, number))
        else:
            heapq.heappush(self._blocked, (number, self._rank))
        self._rank += 1

    def _reach(self) -> float:
        return math.inf if self.window is None else self.head + self.window


def _check(state: Mapping[str, Any]) -> None:
    """Raises UserError unless `state` is one that `WindowedFifo.state` can give."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(f"saved queue: {message}")

    names = ["admitted", "ahead", "finished", "head", "in_flight", "running", "window"]
    need(sorted(state) == names, f"keys are {sorted(state)}, not {names}")
    for name in ("admitted", "head"):
        need(type(state[name]) is int, f"{name}={state[name]!r} must be an integer")
    for name in ("ahead", "finished", "running"):
        need(type(state[name]) is list, f"{name}={state[name]!r} must be a list")
    places = state["running"] + state["finished"]
    for pair in places:
        integers = isinstance(pair, list) and [type(x) for x in pair] == [int, int]
        need(integers, f"{pair!r} must be a number and the count consumed before it")

    head, ahead, window = state["head"], state["ahead"], state["window"]
    need(all(type(n) is int for n in ahead), f"{ahead=} must be integers")
    reach = math.inf if window is None else head + window
    need(all(head < n <= reach for n in ahead), f"{ahead=} is not within the window of {head=}")
    numbers = sorted(ahead + [number for number, _ in places])
    whole = head >= 0 and numbers == list(range(head, state["admitted"]))
    need(whole, f"the items are {numbers}, not all of [{head}, {state['admitted']})")
    need(len(places) <= state["in_flight"], f"{len(places)} items are in flight")
    for number, before in places:
        need(0 <= before <= head + len(ahead), f"item {number} was admitted at count {before}")
