"""Instances: every item gets exactly its service, whoever comes, goes, or fails meanwhile."""

import heapq
import random

import pytest

from forge_jax.sched.instances import FleetConfig, Instances


def served(seed: int) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of each item, and what it was given by its instance since it last began there,
    summed from one event to the next; items come, are removed, and instances fail at random."""
    rng = random.Random(seed)
    slowdown = rng.choice([0.0, 0.3, 1.0])
    one = Instances(FleetConfig(instances=rng.randint(1, 3), slowdown=slowdown))
    wanted: dict[int, float] = {}
    given: dict[int, float] = {}
    ended: dict[int, float] = {}
    events: list[tuple[float, int, int, int]] = []
    for i in range(40):
        heapq.heappush(events, (rng.uniform(0, 30), 1, i, 0))
    for _ in range(3):
        heapq.heappush(events, (rng.uniform(0, 30), 2, rng.randrange(len(one.members)), 0))
        heapq.heappush(events, (rng.uniform(0, 30), 3, rng.randrange(40), 0))
    now = 0.0
    while events:
        at, kind, what, stamp = heapq.heappop(events)
        for members in one.members:
            for item in members:
                given[item] += (at - now) / (1 + slowdown * (len(members) - 1))
        now = at
        if kind == 0 and (item := one.ended(what, stamp, now)) is not None:
            ended[item] = given[item]
        elif kind == 1:
            wanted[what], given[what] = rng.uniform(0.1, 4.0), 0.0
            one.place(what, wanted[what], now)
        elif kind == 2:
            lost = set(one.members[what])
            one.fail(what, now)
            given |= dict.fromkeys(lost, 0.0)
            one.repair(what, now)
        elif kind == 3 and what in wanted and what not in ended:
            one.remove(what, now)
            del wanted[what]
        for when, instance, mark in one.events:
            heapq.heappush(events, (when, 0, instance, mark))
        one.events.clear()
    assert not any(one.members)
    assert not one.homeless
    return wanted, ended


def test_every_item_gets_its_service() -> None:
    for seed in range(150):
        wanted, ended = served(seed)
        assert ended == pytest.approx(wanted), seed


def test_a_new_item_goes_where_there_are_fewest() -> None:
    one = Instances(FleetConfig(instances=3))
    for item in range(7):
        one.place(item, 1.0, 0.0)
    assert [len(members) for members in one.members] == [3, 2, 2]
    one.fail(0, 0.5)
    assert [len(members) for members in one.members] == [0, 4, 3]
    assert one.lost == 3
    one.repair(0, 1.0)
    one.place(7, 1.0, 1.0)
    assert one.members[0] == {7}
