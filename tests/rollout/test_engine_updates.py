"""Laws of the prefix cache and of weight updates, on the engine itself."""

import asyncio
import dataclasses

import numpy as np
import pytest
from small_engine import WIDE, Completion, ask, complete, prompt, served, teacher_logprobs, weights

from forge_jax.config import UPDATES, RolloutConfig
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Finish

DEEP = RolloutConfig(slots=4, context=32, page=4, chunk=8, decode_steps=3)


async def first_cached(engine: RolloutEngine, tokens: np.ndarray) -> tuple[int, Completion]:
    """Tokens of a prompt that were read from the cache, and the completion."""
    before = engine.stats()["tokens_cached"]
    out = await complete(engine, ask(tokens, seed=3, max_tokens=9))
    return int(engine.stats()["tokens_cached"] - before), out


@pytest.mark.parametrize("deterministic", [True, False])
def test_cached_is_cold(deterministic: bool) -> None:
    """A prompt whose pages others computed, in chunks that begin elsewhere, is given the same
    bits in deterministic mode, and else the same but for rounding."""
    cfg = dataclasses.replace(DEEP, deterministic=deterministic)

    async def run() -> None:
        async with served(cfg) as engine:
            for length, seed in [(9, 0), (13, 1), (17, 2), (23, 3)]:
                tokens = prompt(seed, length)
                cached, cold = await first_cached(engine, tokens)
                assert cached == 0
                for shared in range(5, length, 5):
                    mate = np.concatenate([tokens[:shared], prompt(90 + shared, 3)])
                    await complete(engine, ask(mate, seed=1, max_tokens=2))
                cached, warm = await first_cached(engine, tokens)
                assert cached == (length - 1) // 4 * 4
                assert warm.ids == cold.ids
                difference = np.abs(warm.logprobs - cold.logprobs).max()
                assert difference <= (0 if deterministic else 1e-5)

    asyncio.run(run())


@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_a_prompt_in_chunks_is_a_prompt_whole(chunk: int) -> None:
    async def run() -> None:
        async with served(dataclasses.replace(DEEP, chunk=chunk)) as engine:
            out = await complete(engine, ask(prompt(0, 23), seed=3))
        want = teacher_logprobs(weights(), prompt(0, 23), out.ids, 1.0)
        np.testing.assert_allclose(out.logprobs, want, atol=1e-4)

    assert WIDE.context == DEEP.context
    asyncio.run(run())


@pytest.mark.parametrize("mode", UPDATES)
def test_an_update_under_a_deep_queue_lets_nobody_read_what_is_old(mode: str) -> None:
    """40 requests, a group of ten a prompt, and weights that change twice meanwhile."""
    cfg = dataclasses.replace(DEEP, update=mode)
    prompts = [prompt(i // 10, 13) for i in range(40)]

    async def run() -> list[Completion]:
        async with served(cfg) as engine, asyncio.TaskGroup() as group:
            tasks = [
                # Of many lengths, so that some are under way whenever weights change.
                group.create_task(complete(engine, ask(p, seed=i, max_tokens=5 + i % 14)))
                for i, p in enumerate(prompts)
            ]
            for version in (1, 2):
                sampled = engine.stats()["tokens_sampled"]
                while engine.stats()["tokens_sampled"] < sampled + 40:
                    await asyncio.sleep(0)
                await engine.swap(version, weights(version))
        return [task.result() for task in tasks]

    done = asyncio.run(run())
    for tokens, out in zip(prompts, done, strict=True):
        assert out.versions == sorted(out.versions)
        assert (out.finish is Finish.ABORT) <= (mode == "abort")
        # All of one version: its keys and values too, whatever was cached.
        if len(set(out.versions)) == 1 and mode != "keep":
            want = teacher_logprobs(weights(out.versions[0]), tokens, out.ids, 1.0)
            np.testing.assert_allclose(out.logprobs, want, atol=1e-4)
    assert {v for out in done for v in out.versions} == {0, 1, 2}
    mixed = any(len(set(out.versions)) > 1 for out in done)
    assert mixed == (mode in ("keep", "recompute"))
    assert any(out.finish is Finish.ABORT for out in done) == (mode == "abort")


@pytest.mark.parametrize("mode", UPDATES)
def test_a_pause_stops_all_and_resuming_goes_on(mode: str) -> None:
    async def run() -> None:
        async with served(DEEP) as engine:
            asked = [ask(prompt(i, 5), seed=i) for i in range(8)]
            alone = [await complete(engine, request) for request in asked]
            tasks = [asyncio.create_task(complete(engine, request)) for request in asked]
            sampled = engine.stats()["tokens_sampled"]
            while engine.stats()["tokens_sampled"] == sampled:
                await asyncio.sleep(0)
            await engine.pause(mode)
            await asyncio.sleep(0.1)
            paused = engine.stats()
            assert (paused["requests_running"] > 0) == (mode == "keep")
            await asyncio.sleep(0.1)
            assert engine.stats()["tokens_sampled"] == paused["tokens_sampled"]
            engine.resume()
            for out, want in zip(await asyncio.gather(*tasks), alone, strict=True):
                if out.finish is Finish.ABORT:
                    assert mode == "abort"
                else:
                    assert out.ids == want.ids

    asyncio.run(run())
