"""The cost function against its formula, the policies beside it, and what a router knows."""

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
from forge_jax.rollout.router.fleet import STORE

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
