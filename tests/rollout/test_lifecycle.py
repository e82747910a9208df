"""Laws of the engine as a whole: every request ends once, whatever happens around it."""

import asyncio
import dataclasses
import random
from collections import Counter
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    NARROW,
    SMALL,
    Completion,
    ask,
    complete,
    idle_engine,
    prompt,
    replayed_logprobs,
    served,
    serving,
    teacher_logprobs,
    weights,
)

from forge_jax.config import RolloutConfig, UserError
from forge_jax.models.layout import layout
from forge_jax.rollout import programs
from forge_jax.rollout.cache import pool_sharding
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.sharding import make_mesh, shardings
from forge_jax.types import Finish, Refused


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_frees_its_slot(seed: int) -> None:
    """More callers than slots; some leave early, some at once, some stop, some run out."""
    rng = random.Random(seed)

    async def caller(engine: RolloutEngine, i: int) -> str | None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        stop = ("a", "b") if rng.random() < 0.3 else ()
        budget = rng.choice([None, 1, 2, 3, 7])
        request = ask(prompt(i, rng.randrange(1, 16)), max_tokens=budget, stop=stop)
        leave_after = rng.choice([None, None, 0, 1, 2])
        if leave_after == 0:
            task = asyncio.create_task(complete(engine, request))
            await asyncio.sleep(rng.random() * 0.002)
            task.cancel()
            with suppress(asyncio.CancelledError):
                return (await task).finish
            return "left"
        chunks = []
        async with aclosing(engine.generate(request)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == leave_after and chunk.finish is None:
                    return "left"
        assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        if budget is not None:
            assert sum(len(c.ids) for c in chunks) <= budget
        return chunks[-1].finish

    async def run() -> None:
        async with served(NARROW, stop_ids=(10, 20, 30, 40, 50)) as engine:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(caller(engine, i)) for i in range(60)]
            seen = Counter(task.result() for task in tasks)
            assert set(seen) == {"left", Finish.STOP, Finish.LENGTH}
            stats = engine.stats()
            assert stats["requests_abort"] <= seen["left"]
            assert stats["requests_running"] == stats["requests_waiting"] == 0
            # All slots still work.
            done = await asyncio.gather(*(complete(engine, ask(prompt(i, 3))) for i in range(3)))
            assert all(out.finish is not Finish.ABORT for out in done)

    asyncio.run(run())


def test_nothing_compiles_after_the_warm_up() -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    shapes = RolloutConfig(
        slots=2, context=20, page=4, chunk=8, decode_steps=2
    )  # of this test only

    async def run() -> None:
        async with idle_engine(shapes) as engine:
            await engine.warm_up()
            traced = engine.stats()["programs_traced"]
            jax.monitoring.register_event_duration_secs_listener(listen)
            asked = [ask(prompt(n, n), temperature=n % 2, seed=n) for n in range(1, 20)]
            async with serving(engine):
                for version in (1, 2):
                    await asyncio.gather(*(complete(engine, request) for request in asked))
                    await engine.swap(version, weights())
                await asyncio.gather(*(complete(engine, request) for request in asked))
            assert engine.stats()["programs_traced"] == traced
            assert compiled == []

    try:
        asyncio.run(run())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_tokens_after_a_swap_come_from_the_new_weights() -> None:
    """Under load: versions never go back, and the old keys and values stay in use."""
    versions = {0: weights(0), 1: weights(1), 5: weights(2)}
    prompts = [prompt(i, 1 + i) for i in range(12)]
    longer = dataclasses.replace(NARROW, context=32)

    async def run() -> list[Completion]:
        async with served(longer) as engine, asyncio.TaskGroup() as group:
            tasks = [group.create_task(complete(engine, ask(p, seed=1))) for p in prompts]
            for version in (1, 5):
                sampled = engine.stats()["tokens_sampled"]
                while engine.stats()["tokens_sampled"] < sampled + 10:
                    await asyncio.sleep(0)
                await engine.swap(version, versions[version])
                assert engine.version == version
        return [task.result() for task in tasks]

    done = asyncio.run(run())
    assert any(len(set(out.versions)) > 1 for out in done)
    assert {v for out in done for v in out.versions} == {0, 1, 5}
    for tokens, out in zip(prompts, done, strict=True):
        assert out.versions == sorted(out.versions)
        np.testing.assert_allclose(
            out.logprobs, replayed_logprobs(versions, tokens, out), atol=1e-4
        )


def test_published_weights_survive_the_donation_of_their_source() -> None:
    cpu = jax.devices()[0]
    consume = jax.jit(partial(jax.tree.map, jnp.negative), donate_argnums=0)

    async def run() -> None:
        mine = jax.tree.map(lambda x: jax.device_put(x, cpu, may_alias=False), weights())
        async with served(NARROW, params=mine) as engine:
            await engine.swap(1, mine)
            before = await complete(engine, ask(prompt(0, 5), seed=1))
            consume(mine)
            assert all(x.is_deleted() for x in jax.tree.leaves(mine))
            after = await complete(engine, ask(prompt(0, 5), seed=1))
            assert after.ids == before.ids

    asyncio.run(run())


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on() -> None:
    async def run() -> None:
        async with served(NARROW) as engine:
            await engine.swap(3, weights(1))
            for version in (2, 3):  # pages of other weights would pass for those of version 3
                with pytest.raises(ValueError, match=f"version={version} is not newer than"):
                    await engine.swap(version, weights())
            with pytest.raises(ValueError, match="version=4 differ"):
                await engine.swap(4, {**weights(), "norm": np.ones(3, np.float32)})
            assert set((await complete(engine, ask(prompt(0, 5)))).versions) == {3}

    asyncio.run(run())


def test_sharded_weights_and_pages_give_the_same_logprobs() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    cut = jax.device_put(weights(), shardings(layout(SMALL), mesh))
    assert pool_sharding(cut["embed"].sharding, SMALL, 2).spec == jax.P("fsdp", "tensor")

    async def run() -> None:
        with pytest.raises(UserError, match=r"rollout.slots=3 .* the mesh's 2 places"):
            async with served(NARROW, params=cut):
                pass
        async with served(dataclasses.replace(NARROW, slots=4), params=cut) as engine:
            for version in (1, 2):
                out = await complete(engine, ask(prompt(0, 5), seed=1))
                want = teacher_logprobs(weights(), prompt(0, 5), out.ids, 1.0)
                np.testing.assert_allclose(out.logprobs, want, atol=1e-4)
                await engine.swap(version, weights())  # from another placement

    asyncio.run(run())


def test_cancelling_serve_aborts_every_request_once_and_it_can_serve_again() -> None:
    async def run() -> None:
        async with idle_engine(NARROW) as engine:
            asked = [ask(prompt(i, 3), seed=i) for i in range(9)]
            async with asyncio.TaskGroup() as group, serving(engine):
                tasks = [group.create_task(complete(engine, r)) for r in asked]
                while engine.stats()["requests_running"] < NARROW.slots:
                    await asyncio.sleep(0)
            finishes = Counter(task.result().finish for task in tasks)
            assert finishes[Finish.ABORT] >= len(asked) - NARROW.slots
            assert engine.stats()["requests_abort"] == finishes[Finish.ABORT]
            with pytest.raises(Refused, match="stopped") as refused:
                await complete(engine, asked[0])
            assert refused.value.status == 503
            async with serving(engine):
                again = await asyncio.gather(*(complete(engine, r) for r in asked))
            assert {out.finish for out in again} == {Finish.LENGTH}

    asyncio.run(run())


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_a_fault_of_the_device_reaches_every_caller_and_it_can_serve_again(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    async def run() -> None:
        async with idle_engine(NARROW) as engine:
            monkeypatch.setattr(programs, program, broken)
            calls = [complete(engine, ask(prompt(i, 3))) for i in range(9)]
            with pytest.raises(RuntimeError, match="out of memory"):
                async with serving(engine):
                    results = await asyncio.gather(*calls, return_exceptions=True)
            assert len(results) == 9
            for result in results:
                assert isinstance(result, Refused)
                assert result.status == 500
                assert "out of memory" in str(result)
            with pytest.raises(Refused, match="out of memory"):
                await complete(engine, ask(prompt(0, 3)))
            monkeypatch.undo()
            jax.tree.map(lambda x: x.delete(), engine._runner._pool)  # as a call given it may
            async with serving(engine):
                again = [complete(engine, ask(prompt(i, 3), seed=i)) for i in range(9)]
                found = await asyncio.gather(*again)
            for i, out in enumerate(found):
                assert out.finish is Finish.LENGTH
                wanted = teacher_logprobs(weights(), prompt(i, 3), out.ids, 1.0)
                np.testing.assert_allclose(out.logprobs, wanted, atol=1e-4)

    asyncio.run(run())


async def refusal(engine: RolloutEngine) -> None:
    """Serves until a caller is refused; raises what serve() does."""
    async with serving(engine):
        with pytest.raises(Refused, match="failed"):
            await complete(engine, ask(prompt(0, 3)))


def test_broken_weights_are_a_fault() -> None:
    async def run() -> None:
        async with idle_engine(NARROW) as engine:
            await engine.swap(1, {**weights(), "norm": np.full(SMALL.embed, np.nan, np.float32)})
            with pytest.raises(FloatingPointError, match="version 1"):
                await refusal(engine)

    asyncio.run(run())


def test_a_fault_at_the_start_is_raised_by_serve() -> None:
    async def run() -> None:
        async with idle_engine(NARROW, params={"norm": weights()["norm"]}) as engine:
            with pytest.raises(KeyError):
                await refusal(engine)

    asyncio.run(run())


def test_an_idle_engine_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    plan = Scheduler.plan

    def counted(self: Scheduler) -> Any:
        planned.append(plan(self))
        return planned[-1]

    async def run() -> None:
        monkeypatch.setattr(Scheduler, "plan", counted)
        async with served(NARROW) as engine:
            await complete(engine, ask(prompt(0, 3), max_tokens=5))
            await asyncio.sleep(0.05)
            before = len(planned)
            await asyncio.sleep(0.2)
            assert len(planned) == before
            await complete(engine, ask(prompt(0, 3), max_tokens=5))
            assert len(planned) > before

    asyncio.run(run())
