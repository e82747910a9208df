"""Every policy over thousands of orders: bounds, single ends, deadlines, and restarts."""

import json
import math
import random
from collections import Counter

import pytest

from forge_jax.config import UserError
from forge_jax.sched.policies import (
    Bounds,
    GreedyDrop,
    Policy,
    Stream,
    VersionWindow,
    Why,
    Window,
    budget_window,
    fifo,
    greedy,
    share_window,
)
from forge_jax.sched.queue import Deadline, Queue

KINDS = ("fifo", "window", "greedy", "drop", "versions", "stream")


def drawn(kind: str, rng: random.Random, n: int) -> Policy:
    return {
        "fifo": fifo(n),
        "window": Window(in_flight=n, window=rng.randint(0, 2 * n)),
        "greedy": greedy(n),
        "drop": GreedyDrop(in_flight=n, max_updates=rng.randint(0, 4)),
        "versions": VersionWindow(in_flight=n, versions=rng.randint(0, 3)),
        "stream": Stream(running=n, buffer=rng.randint(1, 6)),
    }[kind]


class Player:
    """One trainer and one queue by random events; at most `ahead` batches wait to be trained."""

    def __init__(self, kind: str, seed: int, total: int = 60):
        self.rng = random.Random(f"{kind} {seed}")
        n, self.batch, self.ahead = (self.rng.randint(1, 8), self.rng.randint(1, 4), seed % 2)
        self.policy = drawn(kind, self.rng, n)
        hangs = self.rng.random() < 0.5
        self.deadline = Deadline(seconds=5.0, requeue=seed % 4 < 2) if hangs else None
        self.queue = self.new()
        self.total, self.now = total, 0.0
        self.hung: set[int] = set()
        self.before: dict[int, tuple[int, int]] = {}
        self.order: list[int] = []
        self.log: list[tuple[int, int, int]] = []
        self.gone: dict[int, Why] = {}
        self.again: dict[int, int] = {}
        self.updates = 0

    def new(self) -> Queue:
        return Queue(self.policy, batch=self.batch, ahead=self.ahead, deadline=self.deadline)

    def started(self, number: int) -> None:
        assert number == len(self.before), "numbers are given out in order"
        self.before[number] = (len(self.order), self.updates)
        if self.deadline is not None and self.rng.random() < 0.1:
            self.hung.add(number)

    def event(self) -> None:
        self.now += self.rng.random()
        for one in self.queue.evict(self.now):
            assert one.number not in self.gone
            assert one.number not in self.order
            self.gone[one.number] = one.why
            if one.again is not None:
                self.again[one.again] = one.number
                self.started(one.again)
        kind = self.rng.random()
        able = sorted(set(self.queue.running) - self.hung)
        if kind < 0.35 and len(self.before) < self.total:
            if (number := self.queue.admit()) is not None:
                self.started(number)
        elif kind < 0.6 and able:
            self.queue.finish(self.rng.choice(able))
        elif kind < 0.75 and len(self.order) >= self.batch * (self.updates + 1):
            self.queue.update()
            self.updates += 1
        elif len(self.order) < self.batch * (self.updates + 1 + self.ahead):
            self.take()

    def take(self) -> None:
        if (number := self.queue.take()) is None:
            return
        before, version = self.before[number]
        lag, updates = len(self.order) - before, self.updates - version
        assert (self.queue.last_lag, self.queue.last_updates) == (lag, updates)
        if self.queue.bounds is not None:
            assert lag <= self.queue.bounds.items
            assert updates <= self.queue.bounds.updates
        self.order.append(number)
        self.log.append((number, lag, updates))

    def over(self) -> bool:
        ended = len(self.before) >= self.total and not self.queue.running
        return ended and not self.queue.finished

    def play(self) -> None:
        while not self.over():
            self.event()


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_ends_once_within_the_bounds(kind: str) -> None:
    for seed in range(400):
        player = Player(kind, seed)
        player.play()
        ends = player.order + list(player.gone)
        assert sorted(ends) == list(range(len(player.before))), "each exactly once"
        assert player.queue.consumed == len(player.order)
        counts = Counter(player.gone.values())
        assert player.queue.evicted == {why: counts[why] for why in Why}
        dropping = kind in ("drop", "stream")
        assert dropping or not counts[Why.DROPPED]
        if isinstance(player.policy, Window) and player.policy.window == 0:
            assert player.order == sorted(player.order)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_changes_nothing_but_how_long_the_head_was_watched(kind: str) -> None:
    for seed in range(60):
        plain, resumed = Player(kind, seed), Player(kind, seed)
        for player in (plain, resumed):
            player.deadline, player.queue = (
                None,
                Queue(player.policy, batch=player.batch, ahead=player.ahead),
            )
        plain.play()
        while not resumed.over():
            if len(resumed.order) % 3 == 1:
                state = json.loads(json.dumps(resumed.queue.state()))
                resumed.queue = resumed.new()
                resumed.queue.restore(state)
                assert resumed.queue.state() == state
            resumed.event()
        assert (resumed.log, resumed.gone) == (plain.log, plain.gone)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_hung_head_costs_its_deadline_and_has_a_counted_end(requeue: bool) -> None:
    deadline = Deadline(seconds=10.0, requeue=requeue)
    queue = Queue(Window(in_flight=4, window=2), batch=2, deadline=deadline)
    for number in range(4):
        assert queue.admit() == number
        if number:
            queue.finish(number)
    assert queue.evict(100.0) == []
    assert queue.due == 110.0
    assert [queue.take(), queue.take(), queue.take()] == [1, 2, None], "3 is past [0, 2]"
    assert queue.evict(109.0) == []
    (one,) = queue.evict(110.0)
    assert one.number == 0
    assert queue.take() == 3, "the window has moved on"
    if not requeue:
        assert (one.why, one.again, queue.running) == (Why.EXPIRED, None, ())
        return
    assert (one.why, one.again, queue.running) == (Why.REQUEUED, 4, (4,))
    assert queue.evict(111.0) == []
    assert queue.due == 121.0
    (last,) = queue.evict(121.0)
    assert (last.number, last.why, last.again) == (4, Why.EXPIRED, None), "once, not for ever"
    with pytest.raises(ValueError, match="number=4 has already finished"):
        queue.finish(4)


@pytest.mark.parametrize("requeue", [False, True])
def test_an_item_whose_own_time_is_over_has_a_counted_end_wherever_it_stands(
    requeue: bool,
) -> None:
    deadline = Deadline(seconds=math.inf, requeue=True) if requeue else None
    queue = Queue(Window(in_flight=3, window=3), batch=1, deadline=deadline)
    assert [queue.admit() for _ in range(3)] == [0, 1, 2]
    one = queue.expire(1)
    assert (one.why, one.again) == ((Why.REQUEUED, 3) if requeue else (Why.EXPIRED, None))
    assert queue.evict(1e9) == [], "no head is overdue"
    if requeue:
        assert queue.expire(3).why is Why.EXPIRED, "once, not for ever"
    assert queue.evicted == {Why.EXPIRED: 1, Why.REQUEUED: int(requeue), Why.DROPPED: 0}
    state = queue.state()
    other = Queue(Window(in_flight=3, window=3), batch=1, deadline=deadline)
    other.restore(state)
    assert other.state() == state
    for number in (0, 2):
        queue.finish(number)
    assert [queue.take(), queue.take(), queue.take()] == [0, 2, None]
    with pytest.raises(ValueError, match="number=1 does not run"):
        queue.expire(1)


def worst(queue: Queue, late: int, batch: int, total: int) -> int:
    """The lag of `late`, which finishes last of all that may overtake it; others at once."""
    before, lag = {}, -1
    while queue.consumed < total and lag < 0:
        while (number := queue.admit()) is not None:
            before[number] = queue.consumed
            if number != late:
                queue.finish(number)
        taken = queue.take()
        if taken is None:
            queue.finish(late)
        elif taken == late:
            lag = queue.last_lag
        if queue.consumed >= (queue.version + 1) * batch and taken is not None:
            while (number := queue.admit()) is not None:  # places free at consumption
                before[number] = queue.consumed
                if number != late:
                    queue.finish(number)
            queue.update()
    return lag


@pytest.mark.parametrize(("n", "versions", "batch"), [(4, 0, 2), (6, 1, 3), (8, 2, 4), (3, 3, 1)])
def test_the_bound_of_versions_is_attained(n: int, versions: int, batch: int) -> None:
    policy = VersionWindow(in_flight=n, versions=versions)
    lags = [worst(Queue(policy, batch=batch), late, batch, 200) for late in range(40)]
    assert max(lags) == (versions + 1) * batch + n - 1


def test_a_queue_that_breaks_its_bound_says_so() -> None:
    class Liar(Window):
        def bounds(self, batch: int, ahead: int, most: int | None = None) -> Bounds:
            return Bounds(items=1, updates=9)

    queue = Queue(Liar(in_flight=3, window=3), batch=1)
    for number in range(3):
        queue.admit()
        if number:
            queue.finish(number)
    assert [queue.take(), queue.take()] == [1, 2]
    queue.finish(0)
    with pytest.raises(AssertionError, match="last_lag=2"):
        queue.take()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_window_from_a_lag_budget_is_the_widest_that_keeps_it(ahead: int) -> None:
    for n in range(1, 40):
        for batch in range(1, 9):
            for updates in range(1, 12):
                narrowest = fifo(n).bounds(batch, ahead)
                assert narrowest is not None
                if narrowest.updates > updates:
                    with pytest.raises(UserError, match=f"in_flight={n}"):
                        budget_window(n, batch, updates, ahead)
                    continue
                width = budget_window(n, batch, updates, ahead)
                kept = Window(in_flight=n, window=width).bounds(batch, ahead)
                wider = Window(in_flight=n, window=width + 1).bounds(batch, ahead)
                assert kept is not None
                assert wider is not None
                assert kept.updates <= updates < wider.updates


def test_a_window_as_a_share_of_the_places() -> None:
    assert [share_window(8192, 0.5), share_window(819, 0.3), share_window(3, 0.0)] == [4096, 245, 0]
    with pytest.raises(UserError, match="share=-1"):
        share_window(8, -1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: fifo(0), "in_flight=0"),
        (lambda: Window(in_flight=2, window=-1), "window=-1"),
        (lambda: GreedyDrop(in_flight=2, max_updates=-1), "max_updates=-1"),
        (lambda: VersionWindow(in_flight=2, versions=-2), "versions=-2"),
        (lambda: Stream(running=0, buffer=1), "running=0"),
        (lambda: Stream(running=1, buffer=0), "buffer=0"),
        (lambda: Deadline(seconds=0.0), "seconds=0.0"),
        (lambda: Deadline(seconds=math.nan), "seconds=nan"),
        (lambda: Queue(fifo(1), batch=0), "batch=0"),
        (lambda: Queue(fifo(1), batch=1, ahead=-1), "ahead=-1"),
    ],
)
def test_impossible_settings_are_refused(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
