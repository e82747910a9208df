"""What a router knows: fitted models, who holds which prefix, and the work sent to an instance."""

import itertools
import math
import random

import pytest

from forge_jax.rollout.router.cost import (
    Call,
    Link,
    Prefill,
    Weights,
    by_cost,
)
from forge_jax.rollout.router.fit import LinkFit, PrefillFit
from forge_jax.rollout.router.fleet import STORE, Fleet, Priors
from forge_jax.rollout.router.index import Block, PrefixIndex
from forge_jax.rollout.router.ledger import Ledger


def call(tokens: int = 1000, number: int = 0, session: str = "s") -> Call:
    return Call(number=number, session=session, tokens=tokens)


def test_fits_find_the_model_behind_noisy_observations() -> None:
    rng = random.Random(0)
    true = Prefill(base=0.02, token=2e-4, pair=4e-9, beside=1e-6)
    fit = PrefillFit(Prefill(base=0.001, token=1e-3))
    link = LinkFit(Link(latency=1.0, token=1e-6))
    for _ in range(256):
        tokens, running = rng.randint(1, 30_000), rng.randint(0, 40)
        prefix = rng.randint(0, tokens)
        noise = rng.lognormvariate(0, 0.05)
        fit.observe(tokens, prefix, running, true.seconds(tokens, prefix, running) * noise)
        link.observe(tokens, (0.005 + 2e-5 * tokens) * noise)
    for case in ((100, 0, 0), (20_000, 0, 20), (20_000, 19_000, 5)):
        assert fit.model.seconds(*case) == pytest.approx(true.seconds(*case), rel=0.1)
    assert link.model(0.0).seconds(10_000) == pytest.approx(0.205, rel=0.1)


def test_the_prior_speaks_where_nothing_was_observed() -> None:
    fit = PrefillFit(Prefill(base=0.5, token=1.0, pair=0.25))
    assert fit.model.seconds(10, 4) == pytest.approx(0.5 + 6 + 0.25 * 6 * 7)
    for _ in range(32):  # alike: they tell one number, not how it comes about
        fit.observe(10, 4, 0, 3.0)
    assert fit.model.seconds(10, 4) == pytest.approx(3.0, rel=0.02)
    assert fit.model.seconds(20, 4) > 1.5 * fit.model.seconds(10, 4)


@pytest.mark.parametrize("seed", range(20))
def test_the_index_equals_a_search_of_every_holder(seed: int) -> None:
    rng = random.Random(seed)
    index, truth = PrefixIndex(), {name: [] for name in "abc"}
    for _ in range(300):
        name, key = rng.choice("abc"), rng.randint(0, 7)
        if rng.random() < 0.6:
            index.add(name, key)
            truth[name].append(key)
        elif key in truth[name]:
            index.discard(name, key)
            truth[name].remove(key)
        elif rng.random() < 0.02:
            index.clear(name)
            truth[name].clear()
        blocks = [Block(key, key + 1) for key in rng.sample(range(8), rng.randint(1, 8))]
        found = index.prefixes(blocks)
        for holder, keys in truth.items():
            there = 0
            for block in blocks:
                if block.key not in keys:
                    break
                there += block.tokens
            assert found.get(holder, 0) == there
            assert index.held(holder) == len(set(keys))


def test_a_ledger_counts_down_the_work_that_waits() -> None:
    ledger = Ledger(slots=4, prior=Prefill(token=1e-3))
    ledger.sent(0, 10.0, 1000, 1.0)
    ledger.sent(1, 10.0, 500, 0.5)
    assert (ledger.load, ledger.running) == (2, 0)
    assert ledger.queue(10.0) == pytest.approx(1.5)
    assert ledger.queue(10.4) == pytest.approx(1.1)
    assert ledger.queue(99.0) == pytest.approx(0.5), "a prompt that is late says nothing of others"
    ledger.first(0, 11.0, 0.0, 0)
    assert ledger.queue(11.2) == pytest.approx(0.3)
    ledger.ended(1, 11.3)  # aborted while it waited
    assert (ledger.load, ledger.running, ledger.queue(11.3)) == (1, 1, 0.0)
    ledger.ended(0, 12.0)
    assert ledger.load == 0


def test_a_full_instance_is_waited_for_at_the_rate_at_which_calls_end() -> None:
    ledger = Ledger(slots=2, prior=Prefill())
    for number in range(3):
        ledger.sent(number, 0.0, 10, 0.0)
        ledger.first(number, 0.0, 0.0, 0)
    assert ledger.queue(0.0) == 0.0, "how long calls decode is not known yet"
    ledger.ended(0, 8.0)
    assert ledger.queue(8.0) == pytest.approx(1 * 8 / 2)
    ledger.ended(1, 8.0)
    assert ledger.queue(8.0) == 0.0


def test_how_busy_an_instance_is_follows_what_it_is_sent() -> None:
    ledger, number = Ledger(slots=100, prior=Prefill(token=1e-3)), itertools.count()
    for second in range(600):
        ledger.sent(next(number), float(second), 300, 0.3)
    assert ledger.busy(600.0) == pytest.approx(0.3, rel=0.02)
    assert ledger.busy(660.0) == pytest.approx(0.3 / math.e, rel=0.02)


def fleet(*names: str, **priors: Link) -> Fleet:
    made = Fleet(by_cost, Weights(), Priors(prefill=Prefill(base=0.01, token=1e-3), **priors))
    for name in names:
        made.add(name, slots=8)
    return made


def test_mates_of_a_call_that_was_sent_follow_it() -> None:
    """What an instance is about to compute counts before its cache has it, and only once."""
    known, blocks = fleet("a", "b"), [Block(i, 100) for i in range(10)]
    plans = []
    for number in range(2):
        plans.append(known.decide(call(number=number), blocks, {}, 0.0))
        known.sent(call(number=number), blocks, plans[-1], 0.0)
    assert plans[0].instance == plans[1].instance
    assert plans[1].work == pytest.approx(0.01)
    for number in range(2):  # they end without a token: nothing came of it
        known.ended(number, 1.0)
    assert known.decide(call(number=2), blocks, {}, 1.0).work == pytest.approx(1.01)


def test_new_weights_make_promises_useless() -> None:
    known, blocks = fleet("a"), [Block(i, 100) for i in range(10)]
    known.sent(call(), blocks, known.decide(call(), blocks, {}, 0.0), 0.0)
    known.renewed()
    assert known.decide(call(number=1), blocks, {}, 0.0).work == pytest.approx(1.01)
    known.first(0, 1.0, 0.0, 0)
    known.ended(0, 2.0)


def test_an_instance_that_is_gone_gets_nothing_and_gives_nothing() -> None:
    known, blocks = fleet("a", "b", peer=Link(token=1e-6)), [Block(0, 1000)]
    plan = known.decide(call(), blocks, {"a": 1000}, 0.0)
    assert plan.instance == "a"
    known.sent(call(), blocks, plan, 0.0)
    known.remove("a")
    after = known.decide(call(number=1), blocks, {"a": 1000}, 0.0)
    assert (after.instance, after.source) == ("b", None)
    known.ended(0, 1.0)


def test_transfers_into_one_instance_wait_for_each_other() -> None:
    known, held = fleet("a", store=Link(latency=0.1)), {STORE: 1000}
    first = known.decide(call(number=0), [Block(0, 1000)], held, 0.0)
    known.sent(call(number=0), [Block(0, 1000)], first, 0.0)
    second = known.decide(call(number=1), [Block(1, 1000)], held, 0.0)
    assert first.seconds == pytest.approx(0.1 + 0.01)
    assert second.seconds == pytest.approx(0.2 + 0.01)
    known.fetched(first, 0.1, 1000, 0.1)
    third = known.decide(call(number=1), [Block(1, 1000)], held, 0.1)
    assert third.seconds == pytest.approx(0.1 + 0.01)
