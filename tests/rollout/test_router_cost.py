"""The cost function against its formula, the policies beside it, and what a router knows."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from forge_jax.rollout.router.baselines import (
    POLICIES,
    least_loaded,
    round_robin,
    sticky,
    thresholds,
)
from forge_jax.rollout.router.cost import (
    Call,
    Link,
    Prefill,
    Source,
    View,
    Weights,
    by_cost,
    imposed,
    plan_at,
)
from forge_jax.rollout.router.fit import LinkFit, PrefillFit
from forge_jax.rollout.router.fleet import STORE, Fleet, Priors
from forge_jax.rollout.router.index import Block, PrefixIndex
from forge_jax.rollout.router.ledger import Ledger

PREFILL = Prefill(base=0.01, token=1e-3, pair=1e-7, beside=1e-5)


def view(name: str, **changes: float) -> View:
    plain = View(
        name=name, queue=0.0, inbound=0.0, prefix=0, load=0, running=0, busy=0.0, prefill=PREFILL
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def call(tokens: int = 1000, number: int = 0, session: str = "s") -> Call:
    return Call(number=number, session=session, tokens=tokens)


def draw(seed: int) -> tuple[Call, list[View], list[Source]]:
    rng = random.Random(seed)
    tokens = rng.randint(1, 4000)
    views = [
        view(
            str(i), queue=rng.random(), inbound=rng.random() * 0.1, prefix=rng.randint(0, tokens),
            load=rng.randint(0, 6), running=rng.randint(0, 6), busy=rng.random(),
        )
        for i in range(rng.randint(1, 8))
    ]  # fmt: skip
    sources = [
        Source(
            name=name,
            prefix=rng.randint(0, tokens),
            link=Link(latency=0.01, token=rng.random() * 2e-3, wait=rng.random() * 0.1),
        )
        for name in (STORE, "0")
    ]
    return call(tokens), views, sources


@pytest.mark.parametrize("seed", range(100))
def test_the_plan_is_the_cheapest_by_the_formula(seed: int) -> None:
    """min(q + prefill(n, p), max(q, transfer) + prefill(n, src)) + beta * price * work."""
    asked, views, sources = draw(seed)
    n, weights = asked.tokens, Weights(work=1.5, bound=1e9)

    def seconds(v: View, known: int) -> float:
        m = n - known
        return 0.01 + 1e-3 * m + 1e-7 * m * (known + m / 2) + 1e-5 * m * v.running

    costs = []
    for v in views:
        ways = [(v.queue + seconds(v, v.prefix), seconds(v, v.prefix))]
        for s in sources:
            if s.prefix > v.prefix and s.name != v.name:
                moved = s.link.latency + s.link.token * (s.prefix - v.prefix)
                moved += max(v.inbound, s.link.wait)
                ways.append((max(v.queue, moved) + seconds(v, s.prefix), seconds(v, s.prefix)))
        first, work = min(ways)
        price = 1 / (1 - min(v.busy, 0.9)) ** 2
        costs.append((first + 1.5 * price * work, first))
    plan = by_cost(asked, views, sources, weights)
    chosen = costs[int(plan.instance)]
    assert chosen[0] == pytest.approx(min(costs)[0])
    assert plan.seconds == pytest.approx(chosen[1])


def test_a_transfer_runs_while_the_call_queues() -> None:
    store = Source(name=STORE, prefix=900, link=Link(latency=0.0, token=1e-4))
    waits = plan_at(call(), view("a", queue=0.5), [store])
    assert (waits.source, waits.fetched) == (STORE, 900)
    assert waits.seconds == pytest.approx(0.5 + PREFILL.seconds(1000, 900))
    idle = plan_at(call(), view("a"), [store])
    assert idle.seconds == pytest.approx(0.09 + PREFILL.seconds(1000, 900))


def test_what_is_slower_than_computing_is_not_fetched() -> None:
    slow = Source(name=STORE, prefix=900, link=Link(latency=0.0, token=2e-3))
    assert plan_at(call(), view("a"), [slow]).source is None


def test_a_session_stays_until_waiting_costs_more_than_moving() -> None:
    """Affinity is not a rule: it is the price of the prefix."""
    home, other = view("home", prefix=900), view("other", load=1)
    for queue, chosen in ((0.0, "home"), (0.8, "home"), (3.0, "other")):
        plan = by_cost(call(), [replace(home, queue=queue), other], [], Weights())
        assert plan.instance == chosen, queue


def test_load_beyond_the_bound_is_left_out_however_long_the_prefix() -> None:
    views = [view("a", prefix=1000, load=10), view("b"), view("c")]
    assert by_cost(call(), views, [], Weights(bound=2.0)).instance == "b"
    assert by_cost(call(), views, [], Weights(bound=3.0)).instance == "a"


def test_equal_costs_go_to_the_least_load() -> None:
    views = [view("a", load=2), view("b", load=1), view("c", load=2)]
    assert by_cost(call(), views, [], Weights()).instance == "b"


def test_round_robin_takes_turns_and_least_loaded_balances() -> None:
    views = [view(name) for name in "abc"]
    assert [round_robin(call(number=i), views, [], Weights()).instance for i in range(6)] == [
        *"abcabc"
    ]
    assert {least_loaded(call(number=i), views, [], Weights()).instance for i in range(3)} == {
        *"abc"
    }
    views[0] = view("a", load=1)
    assert "a" not in {
        least_loaded(call(number=i), views, [], Weights()).instance for i in range(9)
    }


def test_sticky_moves_only_the_sessions_of_what_is_gone() -> None:
    views = [view(name) for name in "abcd"]
    where = {
        s: sticky(call(session=s), views, [], Weights()).instance for s in map(str, range(200))
    }
    assert set(where.values()) == {*"abcd"}
    for session, home in where.items():
        now = sticky(call(session=session), views[1:], [], Weights()).instance
        assert home == "a" or now == home


def test_thresholds_follow_the_code_of_sglang() -> None:
    rule, least = Weights(), view("b")
    best = view("a", prefix=301, load=64)
    assert thresholds(call(), [best, least], [], rule).instance == "a"
    assert thresholds(call(), [replace(best, prefix=300), least], [], rule).instance == "b"
    assert thresholds(call(), [replace(best, load=65), least], [], rule).instance == "b"
    near = [replace(best, load=300), replace(least, load=200)]
    assert thresholds(call(), near, [], rule).instance == "a", "300 is not more than 1.5 * 200"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_by_the_quickest_way_of_its_instance(policy: str) -> None:
    asked, views, sources = draw(7)
    plan = POLICIES[policy](asked, views, sources, Weights())
    assert plan == plan_at(asked, views[int(plan.instance)], sources)


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


@pytest.mark.parametrize(
    "wrong", ["work=-1.0", "bound=0.5", "matched=2.0", "apart=-1.0", "ratio=0.0"]
)
def test_weights_name_what_they_refuse(wrong: str) -> None:
    name, value = wrong.split("=")
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Weights(**{name: float(value)})  # type: ignore[arg-type]


def test_work_is_dear_where_others_come_soon() -> None:
    """The price is the derivative of how many calls there are, by how busy the instance is."""
    assert imposed(0.0) == 1.0

    def there(busy: float) -> float:
        return busy / (1 - busy)

    for busy in (0.1, 0.5, 0.8):
        slope = (there(busy + 1e-6) - there(busy - 1e-6)) / 2e-6
        assert imposed(busy) == pytest.approx(slope, rel=1e-4)
    assert imposed(0.99) == imposed(0.95), "beyond that all are as full as each other"
    home, other = view("home", prefix=900, queue=2.5, busy=0.2), view("other", load=1)
    assert by_cost(call(), [home, replace(other, busy=0.0)], [], Weights()).instance == "other"
    assert by_cost(call(), [home, replace(other, busy=0.6)], [], Weights()).instance == "home"


def test_how_busy_an_instance_is_follows_what_it_is_sent() -> None:
    ledger, number = Ledger(slots=100, prior=Prefill(token=1e-3)), itertools.count()
    for second in range(600):
        ledger.sent(next(number), float(second), 300, 0.3)
    assert ledger.busy(600.0) == pytest.approx(0.3, rel=0.02)
    assert ledger.busy(660.0) == pytest.approx(0.3 / math.e, rel=0.02)
