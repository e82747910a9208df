"""Lanes: exact shares in every update, and a restart that changes nothing."""

import json
import math
import random

import pytest

from forge_jax.config import UserError
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import Deadline, Why, Window


def drawn(rng: random.Random) -> tuple[list[float], int]:
    weights = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    shares = [w / sum(weights) for w in weights]
    return shares, rng.randint(round(1 / min(shares)) + 1, 40)


def lanes(shares: list[float], batch: int) -> Lanes:
    policy = Window(in_flight=2 * batch, window=3)
    return Lanes(
        [LaneConfig(name=f"d{i}", policy=policy, share=s) for i, s in enumerate(shares)],
        batch=batch,
    )


def step(one: Lanes, rng: random.Random, size: int) -> list[tuple[int, int]]:
    """Consumes `size` items of what finishes in random order."""
    found = []
    while len(found) < size:
        for queue in one.queues:
            while queue.admit() is not None:
                pass
            queue.finish(rng.choice(queue.running)) if queue.running else None
        if (taken := one.take()) is not None:
            found.append(taken)
    return found


def test_every_update_has_its_shares() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        shares, batch = drawn(rng)
        one = lanes(shares, batch)
        totals = [0] * len(shares)
        for updates in range(1, 30):
            for lane, _ in step(one, rng, batch):
                totals[lane] += 1
            assert one.take() is None, "quotas add up to the batch"
            one.update()
            one.next_batch()
            for total, share in zip(totals, shares, strict=True):
                assert abs(total - share * batch * updates) <= len(shares)
        for queue in one.queues:
            assert queue.version == 29


def test_a_restart_changes_nothing() -> None:
    for seed in range(20):
        shares, batch = drawn(random.Random(seed))
        orders = []
        for restarts in (False, True):
            rng, one, order = random.Random(seed), lanes(shares, batch), []
            for _ in range(8):
                order += step(one, rng, batch // 2)
                if restarts:
                    state = json.loads(json.dumps(one.state()))
                    one = lanes(shares, batch)
                    one.restore(state)
                    assert one.state() == state
                order += step(one, rng, batch - batch // 2)
                one.update()
                one.next_batch()
            orders.append(order)
        assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"extra": 1}, "keys are"),
        ({"queues": {}}, r"\[\]"),
        ({"left": [1]}, "left"),
        ({"left": [9, 9]}, "left"),
    ],
)
def test_a_state_of_other_lanes_is_refused(change: dict, named: str) -> None:
    one = lanes([0.5, 0.5], 6)
    with pytest.raises(UserError, match=named):
        one.restore(one.state() | change)
    spoiled = one.state()
    spoiled["queues"]["d1"]["head"] = 3
    before = one.state()
    with pytest.raises(UserError, match="consumed=0"):
        one.restore(spoiled)
    assert one.state() == before


def test_a_deadline_counts_the_time_in_which_somebody_waits_for_its_head() -> None:
    """Two lanes of one item each in a batch; the clock is a number."""
    policy, deadline = Window(in_flight=2, window=1), Deadline(seconds=10.0)
    one = Lanes(
        [LaneConfig(name=n, policy=policy, share=0.5, deadline=deadline) for n in "ab"], batch=2
    )
    for queue in one.queues:
        assert (queue.admit(), queue.admit()) == (0, 1)
    one.queues[0].finish(1)
    assert [one.evict(lane, 0.0) for lane in (0, 1)] == [[], []]
    assert one.take() == (0, 1), "the head of a hangs, and nobody needs it for this batch"
    assert [one.evict(0, now) for now in (0.0, 4.0, 1000.0)] == [[], [], []]
    assert one.queues[0].due == math.inf
    assert one.evict(1, 4.0) == []
    one.rest(6.0)  # an update: nobody waits for b either
    assert (one.evict(1, None), one.queues[1].due) == ([], math.inf)
    assert one.evict(1, 1000.0) == []
    assert one.queues[1].due == 1004.0
    assert one.evict(1, 1003.9) == []
    [gone] = one.evict(1, 1004.0)
    assert (gone.number, gone.why) == (0, Why.EXPIRED)
    one.queues[1].finish(1)
    assert one.take() == (1, 1)
    one.next_batch()
    assert one.evict(0, 2000.0) == []
    assert one.queues[0].due == 2010.0, "a's head had not been waited for"
