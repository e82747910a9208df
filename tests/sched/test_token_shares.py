"""Shares of sampled tokens: what is consumed converges to them, whatever the lengths of items."""

import json
import random

import pytest

from forge_jax.config import UserError
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.policies import GreedyDrop, Policy, VersionWindow, Window
from forge_jax.sched.shares import ItemShares, TokenShares

UPDATES = 150


def drawn(rng: random.Random) -> tuple[list[float], list[float], int]:
    """Shares, mean lengths up to thirty times apart, and a batch."""
    weights = [rng.randint(1, 5) for _ in range(rng.randint(2, 4))]
    lengths = [rng.choice([1.0, 3.0, 10.0, 30.0]) * 20 for _ in weights]
    return [w / sum(weights) for w in weights], lengths, rng.randint(4, 16)


def played(shares: TokenShares, lengths: list[float], rng: random.Random) -> list[int]:
    """Tokens of each lane in one batch; an item has half to one and a half times the mean."""
    tokens = [0] * len(lengths)
    for lane, quota in enumerate(shares.quotas()):
        for _ in range(quota):
            length = max(1, round(lengths[lane] * rng.uniform(0.5, 1.5)))
            shares.count(lane, length)
            tokens[lane] += length
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_tokens_converge_to_their_shares(seed: int) -> None:
    rng = random.Random(seed)
    wanted, lengths, batch = drawn(rng)
    one, totals = TokenShares(wanted, batch), [0] * len(wanted)
    for _ in range(UPDATES):
        if rng.random() < 0.01:  # a policy that learns says more, or less
            lengths = [length * rng.uniform(0.7, 1.4) for length in lengths]
        totals = [a + b for a, b in zip(totals, played(one, lengths, rng), strict=True)]
    for total, share in zip(totals, wanted, strict=True):
        # Off by a few items at most, however many updates there were.
        assert abs(total - share * sum(totals)) <= 4 * batch**0.5 * max(lengths)
        assert abs(total / sum(totals) - share) < 0.05


def test_quotas_add_up_and_a_restart_changes_nothing() -> None:
    for seed in range(10):
        histories = []
        for restarts in (False, True):
            rng = random.Random(seed)
            wanted, lengths, batch = drawn(rng)
            one, history = TokenShares(wanted, batch), []
            for _ in range(12):
                if restarts:
                    state = json.loads(json.dumps(one.state()))
                    one = TokenShares(wanted, batch)
                    one.restore(state)
                assert sum(one.quotas()) == batch
                history.append(played(one, lengths, rng))
            histories.append(history)
        assert histories[0] == histories[1]


def test_a_lane_whose_items_have_no_tokens_takes_its_turns_and_no_more() -> None:
    one, items = TokenShares([0.5, 0.5], 8), [0, 0]
    for _ in range(50):
        for lane, quota in enumerate(one.quotas()):
            items[lane] += quota
            for _ in range(quota):
                one.count(lane, 0 if lane == 0 else 100)
    assert abs(items[0] - items[1]) <= 8


def test_a_state_of_another_unit_is_refused() -> None:
    items, tokens = ItemShares(["a", "b"], [0.5, 0.5], 4), TokenShares([0.5, 0.5], 4)
    with pytest.raises(UserError, match="unit='items'"):
        tokens.restore(items.state())
    with pytest.raises(UserError, match="of 2 lanes"):
        tokens.restore(TokenShares([1.0], 4).state())


@pytest.mark.parametrize(
    "policy",
    [
        Window(in_flight=9, window=3),
        GreedyDrop(in_flight=9, max_updates=1),
        VersionWindow(in_flight=9, versions=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [False, True])
def test_the_bounds_hold_where_quotas_vary(policy: Policy, tokens: bool) -> None:
    """`Queue.take` asserts them; some items are taken again and again beyond the quota."""
    for seed in range(6):
        rng = random.Random(seed)
        lanes = [LaneConfig(name=n, policy=policy, share=s) for n, s in (("a", 0.3), ("b", 0.7))]
        one = Lanes(lanes, batch=5, tokens=tokens, spare=2)
        for _ in range(40):
            spare = [2, 2]
            while any(one.left):
                for queue in one.queues:
                    queue.evict()
                    while queue.admit() is not None:
                        pass
                    queue.finish(rng.choice(queue.running)) if queue.running else None
                if (taken := one.take()) is None:
                    continue
                lane = taken[0]
                if spare[lane] and rng.random() < 0.5:
                    spare[lane] -= 1
                    one.again(lane)
                else:
                    one.count(lane, rng.randint(1, 90))
            one.update()
            one.next_batch()
        assert sum(lane.items for lane in one.trained) == 40 * 5
