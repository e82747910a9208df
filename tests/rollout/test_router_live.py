"""Two live engines behind a router: the tokens of one, hits that follow, faults that end once."""

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routed_engines import PAGE, SIZES, all_of, requests, routed
from small_engine import (
    PATIENCE,
    ask,
    complete,
    prompt,
    served,
    weights,
)

from forge_jax.rollout.router.cost import Plan, Prefill, Weights
from forge_jax.rollout.router.fleet import Fleet
from forge_jax.rollout.router.live import Router, RouterConfig
from forge_jax.types import Finish, Refused


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded", "sticky", "thresholds"])
def test_the_tokens_are_those_of_one_engine(policy: str) -> None:
    async def test() -> None:
        asked = requests(16)
        async with served(SIZES) as one:
            wanted = [done.ids for done in await all_of(one, asked)]
        async with routed(RouterConfig(policy=policy)) as (router, engines):
            found = [done.ids for done in await all_of(router, asked)]
            stats = router.stats()
            took = [engine.stats()["requests_submitted"] for engine in engines.values()]
        assert found == wanted
        assert sum(took) == stats["requests_submitted"] == 16
        assert min(took) > 0, "both engines work"
        assert stats["router_engines"] == 2

    asyncio.run(test())


def test_a_session_stays_with_its_prefix() -> None:
    """Turn after turn the engine that has the prefix gets the call, and reads it."""

    async def test() -> None:
        async with routed(RouterConfig(peers=False)) as (router, engines):
            ids = prompt(0, 2 * PAGE + 1)
            for turn in range(4):
                [done] = await all_of(router, [ask(ids, seed=turn, max_tokens=PAGE)])
                ids = np.concatenate([ids, done.ids]).astype(np.int32)[: SIZES.context - 2]
            took = sorted(e.stats()["requests_submitted"] for e in engines.values())
            assert took == [0, 4]
            assert router.stats()["tokens_cached"] >= (2 + 3 + 4) * PAGE

    asyncio.run(test())


def test_pages_follow_a_call_to_another_engine() -> None:
    """With the load bound at the mean a call leaves its prefix's engine; the pages come along,
    and the tokens are what they were."""

    async def test() -> None:
        first, _, mate, _ = requests(4)
        async with routed(RouterConfig(policy="round_robin")) as (router, engines):
            home, other = engines.values()
            await complete(router, first)
            assert len(home.cached_prefix(mate.prompt)) == 3
            assert len(other.cached_prefix(mate.prompt)) == 0
            router._fleet._ledgers["b"]._fit.model = replace(
                router._fleet._ledgers["b"].prefill, token=1.0
            )  # computing is dear there, so fetching pays
            chunks = [chunk async for chunk in router.generate(mate)]
            assert chunks[0].cached_tokens == 3 * PAGE
            assert router.stats()["router_tokens_fetched"] == 3 * PAGE
            moved = np.concatenate([chunk.ids for chunk in chunks])
        async with served(SIZES) as one:
            alone = await complete(one, mate)
        np.testing.assert_array_equal(moved, alone.ids)

    asyncio.run(test())


def test_pages_of_the_shared_store_count_at_every_engine(tmp_path: Path) -> None:
    """An engine that never saw a prompt is chosen where the other is busy and the store has it;
    what comes from there changes no token."""
    sizes = replace(SIZES, store=str(tmp_path))

    async def test() -> None:
        first, _, mate, third = requests(4)
        async with routed(RouterConfig(peers=False), sizes) as (router, engines):
            home, other = engines.values()
            router._fleet._ledgers["b"].sent(-1, time.monotonic(), 1000, 1e3)  # b is busy
            for asked in (first, mate, mate, third):  # pages that are hit twice go down
                await complete(router, asked)
            assert home.stats()["requests_submitted"] == 4
            async with asyncio.timeout(PATIENCE):
                while home.stored_prefix(mate.prompt) < 3:
                    await asyncio.sleep(0.01)
            assert len(other.cached_prefix(mate.prompt)) == 0
            router._fleet._ledgers["b"].ended(-1, time.monotonic())
            router._fleet._ledgers["a"].sent(-1, time.monotonic(), 1000, 1e3)
            router._fleet._ledgers["b"]._fit.model = Prefill(token=1.0)  # so that fetching pays
            chunks = [chunk async for chunk in router.generate(mate)]
            assert chunks[0].cached_tokens == 3 * PAGE
            assert other.stats()["tier_store_hits"] == 3
            assert router.stats()["router_tokens_fetched"] == 3 * PAGE
            assert router._fleet._inbound["b"]._moving == 0
            moved = np.concatenate([chunk.ids for chunk in chunks])
            await router.swap(1, weights(1))
            assert home.stored_prefix(mate.prompt) == other.stored_prefix(mate.prompt) == 0
            router._fleet._ledgers["a"].ended(-1, time.monotonic())
        async with served(SIZES) as one:
            alone = await complete(one, mate)
        np.testing.assert_array_equal(moved, alone.ids)

    asyncio.run(test())


def test_a_live_router_decides_as_its_events_say() -> None:
    """What it was told, told to the object that the simulator drives, gives the same plans."""
    told: list[tuple[str, tuple[Any, ...], Any]] = []

    class Recording(Fleet):
        def decide(self, *args: Any) -> Plan:
            told.append(("decide", args, super().decide(*args)))
            return told[-1][2]

        def sent(self, *args: Any) -> None:
            told.append(("sent", args, super().sent(*args)))

        def fetched(self, *args: Any) -> None:
            told.append(("fetched", args, super().fetched(*args)))

        def first(self, *args: Any) -> None:
            told.append(("first", args, super().first(*args)))

        def ended(self, *args: Any) -> None:
            told.append(("ended", args, super().ended(*args)))

        def renewed(self) -> None:
            told.append(("renewed", (), super().renewed()))

    async def test() -> None:
        async with routed() as (router, _):
            live, made = router._fleet, []
            for kind in (Recording, Fleet):
                fleet = kind(live._policy, live._weights, live._priors)
                for name in live.names:
                    fleet.add(name, SIZES.slots)
                made.append(fleet)
            router._fleet, again = made
            await all_of(router, requests(16))
            await router.swap(1, weights(1))
            await all_of(router, requests(8))
        assert [kind for kind, _, _ in told].count("decide") == 24
        for kind, args, gave in told:
            assert getattr(again, kind)(*args) == gave

    asyncio.run(test())


def test_new_weights_reach_every_engine_and_no_old_page_is_read() -> None:
    async def test() -> None:
        asked = requests(8)
        async with routed() as (router, _):
            await all_of(router, asked)
            before = router.stats()["tokens_cached"]
            assert before > 0
            await router.swap(3, weights(1))
            assert router.version == router.stats()["weight_version"] == 3
            chunks = [chunk async for chunk in router.generate(asked[0])]
            assert chunks[0].cached_tokens == 0
            assert {int(v) for chunk in chunks for v in chunk.versions} == {3}

    asyncio.run(test())


def test_an_engine_that_fails_is_taken_out_and_requests_end_once() -> None:
    """Those without a token go on at the other engine, with the tokens they would have had."""

    async def test() -> None:
        asked = requests(16)
        async with served(SIZES) as one:
            wanted = [done.ids for done in await all_of(one, asked)]
        async with routed(RouterConfig(policy="round_robin")) as (router, engines):

            def broken(*args: Any) -> Any:
                raise RuntimeError("the device is gone")

            engines["a"]._runner.advance = broken  # type: ignore[method-assign]
            found = [done.ids for done in await all_of(router, asked)]
            assert found == wanted
            assert router.stats()["router_engines"] == 1
            engines["b"]._runner.advance = broken  # type: ignore[method-assign]
            with pytest.raises(Refused, match="the device is gone"):
                await complete(router, asked[0])
            with pytest.raises(Refused, match="every engine has failed"):
                await complete(router, asked[0])

    asyncio.run(test())


def test_a_request_with_tokens_ends_with_the_fault_of_its_engine() -> None:
    async def test() -> None:
        async with routed(RouterConfig(policy="round_robin")) as (router, engines):
            chunks = router.generate(ask(prompt(0, 5), seed=1, max_tokens=50))
            assert (await anext(chunks)).finish is None

            def broken(*args: Any) -> Any:
                raise RuntimeError("the device is gone")

            engines["a"]._runner.advance = broken  # type: ignore[method-assign]
            with pytest.raises(Refused, match="the device is gone"):
                [chunk async for chunk in chunks]
            assert router.stats()["router_engines"] == 1

    asyncio.run(test())


def test_a_bad_request_takes_no_engine_out() -> None:
    async def test() -> None:
        async with routed() as (router, _):
            with pytest.raises(Refused) as refusal:
                await complete(router, ask(prompt(0, SIZES.context + 1)))
            assert refusal.value.status == 400
            assert router.stats()["router_engines"] == 2

    asyncio.run(test())


def test_callers_that_go_away_and_a_router_that_stops_leave_nothing() -> None:
    async def test() -> None:
        async with routed() as (router, _):
            chunks = router.generate(ask(prompt(0, 5), seed=1, max_tokens=50))
            await anext(chunks)
            await chunks.aclose()
            assert {ledger.load for ledger in router._fleet._ledgers.values()} == {0}
            waiting = [router.generate(request) for request in requests(4)]
            for chunk in await asyncio.gather(*(anext(one) for one in waiting)):
                assert chunk.finish in (None, Finish.LENGTH)
            for one in waiting:
                await one.aclose()

    asyncio.run(test())


def test_a_policy_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="policy='best' must be one of cost"):
        RouterConfig(policy="best", weights=Weights())


def test_totals_add_up_and_shares_do_not() -> None:
    """Of engines with different keys: a sum of all that tell it, a mean of those, the oldest
    version."""

    @dataclass
    class Telling:
        told: dict[str, float]
        version: int = 0

        def stats(self) -> dict[str, float]:
            return self.told

    one = {"tokens_sampled": 3, "slot_utilisation": 0.5, "weight_version": 4, "speedup_8": 2.0}
    two = {"tokens_sampled": 5, "slot_utilisation": 1.0, "weight_version": 3, "acceptance_1": 0.4}
    engines: dict[str, Any] = {"a": Telling(one), "b": Telling(two)}
    router = Router(engines, SIZES, RouterConfig())
    assert router.stats() == {
        "tokens_sampled": 8,
        "slot_utilisation": 0.75,
        "weight_version": 3,
        "speedup_8": 2.0,
        "acceptance_1": 0.4,
        "router_engines": 2,
        "router_tokens_fetched": 0,
    }
    router._out("b")
    assert router.stats()["weight_version"] == 4
    assert "acceptance_1" not in router.stats()
