"""The generation queue: what may be taken, in which order, how late, and across a restart."""

import json
import random
from collections.abc import Iterator

import pytest

from forge_jax.config import UserError
from forge_jax.sched.policies import Window
from forge_jax.sched.queue import Queue

BLOCKS, ORDERS = 20, 150  # seeded orders: 3000 in all


def windowed(in_flight: int, window: int | None) -> Queue:
    return Queue(Window(in_flight=in_flight, window=window), batch=1)


class Witness:
    """Plays a queue by random events and keeps its own books of what must hold."""

    def __init__(self, rng: random.Random, total: int, in_flight: int, window: int | None):
        self.rng, self.total, self.window = rng, total, window
        self.in_flight = in_flight
        self.fifo = windowed(in_flight, window)
        self.running: list[int] = []
        self.finished: list[int] = []  # unconsumed, in the order they finished
        self.order: list[int] = []
        self.lags: list[int] = []
        self.before: dict[int, int] = {}

    def event(self, admitting: bool = True) -> None:
        kind = self.rng.random()
        if kind < 0.4 and admitting:
            self.admit()
        elif kind < 0.7 and self.running:
            number = self.rng.choice(self.running)
            self.running.remove(number)
            self.finished.append(number)
            self.fifo.finish(number)
        else:
            self.take()

    def admit(self) -> None:
        if self.fifo.admitted == self.total:
            return
        room = len(self.running) + len(self.finished) < self.in_flight
        number = self.fifo.admit()
        assert (number is not None) == room
        if number is not None:
            assert number == len(self.before), "numbers are given out in order"
            self.running.append(number)
            self.before[number] = len(self.order)

    def take(self) -> None:
        head = next(n for n in range(self.total + 1) if n not in self.order)
        assert self.fifo.head == head
        eligible = [n for n in self.finished if self.window is None or n <= head + self.window]
        taken = self.fifo.take()
        assert taken == (eligible[0] if eligible else None)
        if taken is not None:
            self.lags.append(len(self.order) - self.before[taken])
            assert self.fifo.last_lag == self.lags[-1]
            self.finished.remove(taken)
            self.order.append(taken)

    def play(self) -> None:
        while len(self.order) < self.total:
            self.event()

    def play_in_steps(self, batch: int) -> None:
        """Admits only between steps of `batch` consumptions, and then all it can."""
        while len(self.order) < self.total:
            for _ in range(self.in_flight):
                self.admit()
            end = min(len(self.order) + batch, self.total)
            while len(self.order) < end:
                self.event(admitting=False)


def draws(block: int) -> Iterator[Witness]:
    for seed in range(block * ORDERS, (block + 1) * ORDERS):
        rng = random.Random(seed)
        in_flight = rng.randint(1, 8)
        window = rng.choice([None, 0, rng.randint(0, 4), rng.randint(0, 2 * in_flight)])
        yield Witness(rng, rng.randint(1, 30), in_flight, window)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_only_the_window_is_taken_first_finished_first(block: int) -> None:
    for witness in draws(block):
        witness.play()
        assert sorted(witness.order) == list(range(witness.total)), "each exactly once"
        assert witness.fifo.take() is None
        assert witness.fifo.running == witness.fifo.finished == ()
        if witness.window == 0:
            assert witness.order == list(range(witness.total))
        if witness.fifo.lag_bound is not None:
            assert max(witness.lags) <= witness.fifo.lag_bound


@pytest.mark.parametrize("block", range(BLOCKS // 4))
def test_a_restored_queue_continues_as_if_nothing_had_happened(block: int) -> None:
    for plain, resumed in zip(draws(block), draws(block), strict=True):
        plain.play()
        interruptions = random.Random(block)
        while len(resumed.order) < resumed.total:
            if interruptions.random() < 0.2:
                state = json.loads(json.dumps(resumed.fifo.state()))
                old = resumed.fifo
                resumed.fifo = windowed(resumed.in_flight, resumed.window)
                resumed.fifo.restore(state)
                assert resumed.fifo.state() == state
                assert resumed.fifo.running == old.running
                assert resumed.fifo.finished == old.finished
            resumed.event()
        assert (resumed.order, resumed.lags) == (plain.order, plain.lags)


def hung(fifo: Queue, total: int, late: int, step: int = 1) -> tuple[list[int], list[int]]:
    """All items finish at once but `late`, which finishes when nothing else can be taken.

    Places are filled after every `step` consumptions. Returns the order of consumption
    and, by number, how many items had been consumed at admission.
    """
    order: list[int] = []
    before: list[int] = []
    while len(order) < total:
        while len(order) % step == 0 and len(before) < total and (n := fifo.admit()) is not None:
            before.append(len(order))
            if n != late:
                fifo.finish(n)
        number = fifo.take()
        if number is None:
            fifo.finish(late)
        else:
            order.append(number)
    return order, before


@pytest.mark.parametrize("in_flight", [2, 3, 5, 8])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 20])
def test_the_lag_bound_is_attained(in_flight: int, window: int) -> None:
    fifo = windowed(in_flight, window)
    late = in_flight - 1
    order, before = hung(fifo, 60, late)
    assert order.index(late) - before[late] == fifo.lag_bound == in_flight + window - 1


def test_greedy_has_no_bound() -> None:
    fifo = windowed(2, None)
    assert fifo.lag_bound is None
    assert hung(fifo, 500, 0)[0][-1] == 0


def update_lags(order: list[int], before: list[int], batch: int, freed: str) -> list[int]:
    """By consumption: updates completed between an item's admission and its training.

    An update is complete when its batch has trained: by the time places free after the
    step; not yet, for the last of its batch, when they free at consumption; and not
    even when the batch after it is consumed, if that is chosen while it trains.
    """
    completed = {
        "after the step": lambda n: n // batch,
        "at consumption": lambda n: max(0, n - 1) // batch,
        "one batch ahead": lambda n: max(0, (n - 1) // batch - 1),
    }[freed]
    return [at // batch - completed(before[number]) for at, number in enumerate(order)]


DISCIPLINES = {"after the step": 0, "at consumption": 1, "one batch ahead": 2}


@pytest.mark.parametrize("freed", DISCIPLINES)
@pytest.mark.parametrize("block", range(BLOCKS // 4))
def test_the_lag_bound_in_updates(block: int, freed: str) -> None:
    for witness in draws(block):
        if witness.window is None:
            continue
        batch = witness.rng.randint(1, witness.in_flight)
        if freed == "after the step":
            witness.play_in_steps(batch)
        else:
            witness.play()
        before = [witness.before[n] for n in range(witness.total)]
        bound = (witness.in_flight + witness.window - 1) // batch + DISCIPLINES[freed]
        assert max(update_lags(witness.order, before, batch, freed)) <= bound


@pytest.mark.parametrize("freed", DISCIPLINES)
@pytest.mark.parametrize(
    ("in_flight", "window", "batch"), [(4, 2, 2), (6, 3, 2), (8, 8, 4), (9, 4, 3)]
)
def test_the_lag_bound_in_updates_is_attained(
    in_flight: int, window: int, batch: int, freed: str
) -> None:
    worst = 0
    for late in range(40):
        fifo = windowed(in_flight, window)
        step = batch if freed == "after the step" else 1
        order, before = hung(fifo, 80, late, step)
        worst = max(worst, *update_lags(order, before, batch, freed))
    assert worst == (in_flight + window - 1) // batch + DISCIPLINES[freed]


def test_misuse_is_refused() -> None:
    fifo = windowed(2, 0)
    fifo.admit()
    for number in (-1, 1, 7):
        with pytest.raises(ValueError, match=f"number={number} is not admitted"):
            fifo.finish(number)
    fifo.finish(0)
    with pytest.raises(ValueError, match="number=0 has already finished"):
        fifo.finish(0)
    assert fifo.take() == 0
    with pytest.raises(ValueError, match="number=0 has already finished"):
        fifo.finish(0)


@pytest.mark.parametrize(("in_flight", "window"), [(0, 0), (-3, None), (4, -1)])
def test_impossible_sizes_are_refused(in_flight: int, window: int | None) -> None:
    with pytest.raises(ValueError, match=r"(in_flight|window)=-?\d+ must be"):
        windowed(in_flight, window)


def some_state() -> dict:
    """Items 0 and 2 consumed, 1 (the head) and 4 running, 3 finished."""
    fifo = windowed(3, 2)
    for _ in range(3):
        fifo.admit()
    for number in (0, 2):
        fifo.finish(number)
        assert fifo.take() == number
        fifo.admit()
    fifo.finish(3)
    return fifo.state()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy": {"kind": "Window", "in_flight": 4, "window": 2}}, "in_flight=4.*in_flight=3"),
        ({"policy": {"kind": "Window", "in_flight": 3, "window": None}}, "window=None.*window=2"),
        ({"policy": {"kind": "Window", "in_flight": 3}}, "window=None.*window=2"),
        ({"policy": {"kind": "GreedyDrop", "in_flight": 3, "window": 2}}, "kind='GreedyDrop'"),
        ({"policy": 3}, "policy=3"),
        ({"head": 2.0}, "head=2.0"),
        ({"head": 2}, "head=2"),
        ({"head": -1}, "head=-1"),
        ({"admitted": 6}, "items are"),
        ({"admitted": True}, "admitted=True"),
        ({"consumed": 3}, "consumed=3"),
        ({"version": -1}, "version=-1"),
        ({"ahead": [1]}, "ahead"),
        ({"ahead": [9]}, "items are"),
        ({"ahead": ["2"]}, "ahead"),
        ({"ahead": None}, "ahead"),
        ({"finished": [[3, 99, 0]]}, "item 3"),
        ({"finished": [[3, 1, 9]]}, "item 3"),
        ({"finished": [[3, 1, 0], [1, 0, 0]]}, "items are"),
        ({"finished": [3]}, "3 must be 3 integers"),
        ({"running": {}}, "running"),
        ({"edges": [[1]]}, "edges"),
        ({"evicted": {"dropped": 0}}, "evicted"),
        ({"change": 3}, "change"),
        ({"change": {"items": 1, "places": 3, "until": 77, "window": 2}}, "must end in"),
        ({"change": {"items": 1, "places": 1, "until": 4, "window": 2}}, "in flight"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict, named: str) -> None:
    fifo = windowed(3, 2)
    untouched = fifo.state()
    with pytest.raises(UserError, match=named):
        fifo.restore(some_state() | change)
    assert fifo.state() == untouched
    fifo.restore(some_state())
    assert fifo.take() == 3, "inside [1, 3]"
    assert fifo.take() is None


@pytest.mark.parametrize("key", list(some_state()))
def test_a_state_with_a_missing_key_is_refused(key: str) -> None:
    state = some_state()
    del state[key]
    with pytest.raises(UserError, match="keys are"):
        windowed(3, 2).restore(state)
