"""Which work is admitted, which finished work may be taken, and which is given up: by policy.

What a policy may see of a queue flows in (`View`), decisions flow out. Policies are frozen records
of pure functions, so that one queue, its checkpoints and its simulator serve them all. The
invariant: where a policy states a bound of the lag, no order of finishing exceeds it.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import Any, Protocol

from forge_jax.config import UserError, check


class Why(enum.StrEnum):
    """Why an item was given up."""

    DROPPED = "dropped"  # by the policy
    EXPIRED = "expired"  # unfinished, it was waited for as the head, or took, for too long
    REQUEUED = "requeued"  # as EXPIRED, the first time: it goes on as another number


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """How long an unfinished head may be waited for, in the seconds of whoever calls `evict`, and
    what becomes of an item whose time is over."""

    seconds: float  # inf: for ever
    requeue: bool = False  # True: the first time it goes to the end of the queue

    def __post_init__(self) -> None:
        check(self.seconds > 0, f"seconds={self.seconds} must be a number > 0")


class View(Protocol):
    """What a policy may see of a queue."""

    @property
    def head(self) -> int:
        """The oldest number that is neither consumed nor given up."""

    @property
    def version(self) -> int:
        """Updates completed."""

    @property
    def in_service(self) -> int:
        """How many items are running."""

    @property
    def waiting(self) -> int:
        """How many items have finished and are not consumed."""

    def head_version(self) -> int:
        """Updates that were complete when the head was admitted."""

    def last_of(self, version: int) -> float:
        """The largest number admitted by the end of `version`; inf while it has not ended."""

    def first_finished(self) -> int:
        """The waiting item that finished first."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest lag of a consumed item, whatever the order of finishing."""

    items: int  # consumed between its admission and its own consumption
    updates: float  # completed between its admission and its training; inf: no bound


class Policy(Protocol):
    """Admits, selects and gives up; selection is of what finished first up to `reach`."""

    @property
    def places(self) -> int:
        """How many items may be running at once."""

    @property
    def holds(self) -> bool:
        """Whether a finished item keeps its place until it is consumed or given up."""

    def admits(self, queue: View) -> bool:
        """Whether there is a place for one more item."""

    def reach(self, queue: View) -> float:
        """The largest number that may be taken now; it never falls below what it once let in."""

    def evicts(self, queue: View) -> int | None:
        """An item to give up now, if there is one."""

    def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds | None:
        """For `batch` items an update, or up to `most`, places that free at consumption, and
        `ahead` batches chosen while another trains; None: there are none."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Windowed FIFO: of [H, H+W], what finished first; 0 is strict FIFO.

    Method: MiniMax, "Forge: Scalable Agent RL Framework and Algorithm" (2026), and arXiv
    2605.26494, section 6.2.4.
    """

    in_flight: int  # N: running, or finished and not consumed
    window: int | None  # W: how far past the head may be taken; None is greedy

    def __post_init__(self) -> None:
        check(self.in_flight >= 1, f"in_flight={self.in_flight} must be at least 1")
        fine = self.window is None or self.window >= 0
        check(fine, f"window={self.window} must be >= 0, or None for greedy")

    @property
    def places(self) -> int:
        return self.in_flight

    @property
    def holds(self) -> bool:
        return True

    def admits(self, queue: View) -> bool:
        return queue.in_service + queue.waiting < self.in_flight

    def reach(self, queue: View) -> float:
        return math.inf if self.window is None else queue.head + self.window

    def evicts(self, queue: View) -> int | None:
        return None

    def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds | None:
        if self.window is None:
            return None
        items = self.in_flight + self.window - 1
        return Bounds(items=items, updates=updates_of(items, batch, ahead))


@dataclass(frozen=True, kw_only=True)
class GreedyDrop:
    """What finished first; what is older than some updates is given up, running or not."""

    in_flight: int  # N
    max_updates: int  # completed since its admission that an item may be trained after

    def __post_init__(self) -> None:
        check(self.in_flight >= 1, f"in_flight={self.in_flight} must be at least 1")
        check(self.max_updates >= 0, f"max_updates={self.max_updates} must be >= 0")

    @property
    def places(self) -> int:
        return self.in_flight

    @property
    def holds(self) -> bool:
        return True

    def admits(self, queue: View) -> bool:
        return queue.in_service + queue.waiting < self.in_flight

    def reach(self, queue: View) -> float:
        return math.inf

    def evicts(self, queue: View) -> int | None:
        old = queue.version - queue.head_version() > self.max_updates
        return queue.head if old else None

    def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds | None:
        # At version v at most (v + 1 + ahead) * P items have been consumed, this one included.
        items = (self.max_updates + 1 + ahead) * (batch if most is None else most) - 1
        return Bounds(items=items, updates=self.max_updates + ahead)


@dataclass(frozen=True, kw_only=True)
class VersionWindow:
    """A window in weights: what was admitted at most V updates after the head was.

    All items that may overtake one were admitted before version v + V + 1, so at most
    (V + 1) P + N - 1 are consumed while it waits.
    """

    in_flight: int  # N
    versions: int  # V: 0 takes the items of the head's own version in any order

    def __post_init__(self) -> None:
        check(self.in_flight >= 1, f"in_flight={self.in_flight} must be at least 1")
        check(self.versions >= 0, f"versions={self.versions} must be >= 0")

    @property
    def places(self) -> int:
        return self.in_flight

    @property
    def holds(self) -> bool:
        return True

    def admits(self, queue: View) -> bool:
        return queue.in_service + queue.waiting < self.in_flight

    def reach(self, queue: View) -> float:
        return queue.last_of(queue.head_version() + self.versions)

    def evicts(self, queue: View) -> int | None:
        return None

    def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds | None:
        of_update = batch if most is None else most
        items = (self.versions + 1 + ahead) * of_update + self.in_flight - 1
        return Bounds(items=items, updates=updates_of(items, batch, ahead))


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Generation that never stops: a buffer of finished work that drops its oldest when full.

    This is the queue of Applied Compute, "Predicting and Controlling Staleness in Fully
    Asynchronous RL Training" (2026), whose mean is `stream_staleness`.
    """

    running: int  # C: items in service, always
    buffer: int  # finished items that may wait

    def __post_init__(self) -> None:
        check(self.running >= 1, f"running={self.running} must be at least 1")
        check(self.buffer >= 1, f"buffer={self.buffer} must be at least 1")

    @property
    def places(self) -> int:
        return self.running

    @property
    def holds(self) -> bool:
        return False

    def admits(self, queue: View) -> bool:
        return queue.in_service < self.running

    def reach(self, queue: View) -> float:
        return math.inf

    def evicts(self, queue: View) -> int | None:
        return queue.first_finished() if queue.waiting > self.buffer else None

    def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds | None:
        return None


POLICIES = (Window, GreedyDrop, VersionWindow, Stream)


def fifo(in_flight: int) -> Window:
    """Strict FIFO."""
    return Window(in_flight=in_flight, window=0)


def greedy(in_flight: int) -> Window:
    """Whatever finished first, without a bound."""
    return Window(in_flight=in_flight, window=None)


def as_plain(policy: Policy) -> dict[str, Any]:
    """A policy as plain JSON, for checkpoints and logs."""
    assert isinstance(policy, POLICIES), policy
    return {"kind": type(policy).__name__, **dataclasses.asdict(policy)}


def updates_of(items: int, batch: int, ahead: int) -> float:
    """The lag in updates of at least `batch` items each that one in items may come to."""
    return items // batch + 1 + ahead if batch else math.inf


def share_window(in_flight: int, share: float) -> int:
    """W as a fraction of N, rounded down. Raises UserError for a share below 0."""
    if not 0 <= share < math.inf:
        raise UserError(f"{share=} must be a number >= 0")
    return int(share * in_flight)


def budget_window(in_flight: int, batch: int, updates: int, ahead: int = 0) -> int:
    """The widest W whose lag is at most `updates`, places freeing at consumption.

    Raises UserError where not even FIFO keeps the budget with N places.
    """
    window = (updates - ahead) * batch - in_flight
    if window < 0:
        most = max(0, updates - ahead) * batch
        raise UserError(
            f"in_flight={in_flight}: a lag of {updates} updates of {batch} items needs at most "
            f"{most} places"
        )
    return window


def stream_staleness(running: float, batch: int, supply: float, buffer: float) -> float:
    """The published mean lag of a `Stream`, in updates. `running` items in service (of groups whose
    members have places of their own: C M / G, M the mean longest member over the mean member),
    `supply`: the rate of generation over that of training, `buffer` in batches."""
    if supply < 1:
        return running / batch + supply
    return running / (supply * batch) + (2 * buffer + supply - 1) / (2 * supply)
