"""Prefill and decode on meshes of their own: the same tokens as together, whatever happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from small_engine import SMALL, Completion, ask, complete, serving

from forge_jax.config import RolloutConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.access import places_of
from forge_jax.rollout.disaggregated import DisaggregatedEngine, decoding
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.sharding import make_mesh, mesh_of, shardings

DENSE = replace(SMALL, kv_heads=4)
EXPERTS = replace(SMALL, family="qwen3_moe", experts=4, experts_per_token=2)
MODULES = replace(SMALL, family="qwen3", mtp=2)
# One shape of each program to compile.
ROLLOUT = RolloutConfig(slots=3, context=32, page=8, chunk=16, decode_steps=3, deterministic=True)
# First device and axes of the side that prefills, and of the one that decodes.
APART = {"prefill": (0, {"tensor": 4}), "decode": (4, {"data": 2, "tensor": 2})}
CASES = {
    "dense": (DENSE, ROLLOUT, APART),
    "experts": (
        EXPERTS,
        replace(ROLLOUT, routes=True),
        {"prefill": (0, {"tensor": 2}), "decode": (2, {"expert": 2})},
    ),
    "modules": (
        MODULES,
        replace(ROLLOUT, speculate="mtp", drafts=2),
        {"prefill": (0, {}), "decode": (1, {"tensor": 2})},
    ),
}
PROMPTS = [np.arange(n, dtype=np.int32) * 3 % 250 for n in (1, 8, 9, 17, 21, 26)]


def weights(cfg: ModelConfig, seed: int = 0) -> Any:
    return init(cfg, jax.random.key(seed))


@asynccontextmanager
async def together(cfg: ModelConfig, rollout: RolloutConfig) -> AsyncIterator[RolloutEngine]:
    with ThreadPoolExecutor(1) as device:
        engine = RolloutEngine(cfg, weights(cfg), (), rollout, ByteTokenizer(), device)
        async with serving(engine):
            yield engine


@asynccontextmanager
async def apart(
    cfg: ModelConfig, rollout: RolloutConfig, meshes: Any = APART
) -> AsyncIterator[tuple[DisaggregatedEngine, RolloutEngine, RolloutEngine]]:
    """The engine, and the ones that it is made of."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, (first, axes) in meshes.items():
            mesh = make_mesh(**axes, devices=jax.devices()[first:])
            params = jax.device_put(weights(cfg), shardings(layout(cfg), mesh))
            device = stack.enter_context(ThreadPoolExecutor(1))
            places = places_of(mesh_of(params))
            each = replace(rollout, slots=8 * places) if places > 1 else rollout
            sides[side] = RolloutEngine(cfg, params, (), each, ByteTokenizer(), device)
        prefill, decode = sides["prefill"], sides["decode"]
        engine = DisaggregatedEngine([prefill], [decode], rollout)
        async with serving(engine):
            yield engine, prefill, decode
        for side in (prefill, decode):
            stats = side.stats()
            assert stats["requests_running"] == stats["requests_waiting"] == 0
            side._scheduler.audit()


async def all_of(engine: Any) -> list[Completion]:
    return await asyncio.gather(
        *(complete(engine, ask(ids, seed=n, max_tokens=8)) for n, ids in enumerate(PROMPTS))
    )


def same(a: Completion, b: Completion) -> bool:
    return a.ids == b.ids and np.allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_engine(case: str) -> None:
    """Other meshes, other cuts; with experts whose routes come along, and with modules that
    draft on from states that come along."""
    cfg, rollout, meshes = CASES[case]

    async def routes(engine: Any) -> np.ndarray | None:
        parts = [c.routes async for c in engine.generate(ask(PROMPTS[4], seed=4, max_tokens=8))]
        return np.concatenate(parts) if cfg.experts else None

    async def main() -> None:
        async with together(cfg, rollout) as one:
            wanted, recorded = await all_of(one), await routes(one)
        async with apart(cfg, rollout, meshes) as (engine, prefill, decode):
            found = await all_of(engine)
            assert all(map(same, found, wanted))
            assert engine.stats()["moved_pages"] > 0
            # The decoding side computed less than a page of any prompt.
            rest = sum((len(ids) - 1) % rollout.page for ids in PROMPTS)
            assert decode.stats()["tokens_prefilled"] == rest
            moved, asked = engine.stats()["moved_pages"], prefill.stats()["requests_submitted"]
            assert all(map(same, await all_of(engine), wanted))
            assert engine.stats()["moved_pages"] == moved  # it has them all
            assert prefill.stats()["requests_submitted"] == asked
            if cfg.experts:
                assert np.array_equal(await routes(engine), recorded)
            await check_moved(engine, prefill, decode, bool(cfg.mtp))
            if cfg.mtp:
                assert decode.stats()["accepted_tokens"] > 0

    asyncio.run(main())


async def check_moved(
    engine: DisaggregatedEngine, source: RolloutEngine, target: RolloutEngine, modules: bool
) -> None:
    """The pages of a prompt that nobody has seen are on both sides, bit by bit."""
    ids = PROMPTS[5][::-1].copy()
    await complete(engine, ask(ids, seed=0, max_tokens=2))
    one, other = await source.export_prefix(ids), await target.export_prefix(ids)
    assert one.pages == other.pages == 3
    [mine], [theirs] = one.parts, other.parts
    np.testing.assert_array_equal(np.asarray(mine.kv)[:3], np.asarray(theirs.kv)[:3])
    assert (mine.tails is not None) == modules
    if modules:
        assert np.asarray(mine.tails)[:3].any()
        np.testing.assert_array_equal(np.asarray(mine.tails)[:3], np.asarray(theirs.tails)[:3])


def test_a_group_moves_its_prompt_once_and_is_told_what_was_cached() -> None:
    async def main() -> None:
        async with apart(DENSE, ROLLOUT) as (engine, prefill, _):

            async def first(n: int, ids: np.ndarray) -> int:
                chunks = [c async for c in engine.generate(ask(ids, seed=n, max_tokens=4))]
                assert not any(c.cached_tokens for c in chunks[1:])
                return chunks[0].cached_tokens

            cached = await asyncio.gather(*(first(n, PROMPTS[5]) for n in range(6)))
            assert sorted(cached) == [0, *[24] * 5]
            assert engine.stats()["moved_pages"] == 3
            assert prefill.stats()["requests_submitted"] == 1
            other = np.concatenate([PROMPTS[5][:16], PROMPTS[4][:10]])
            assert await first(9, other) == 16
            assert engine.stats()["moved_pages"] == 4  # what is not common alone

    asyncio.run(main())


def test_new_weights_reach_both_sides_and_old_pages_neither() -> None:
    newer = weights(DENSE, 1)

    async def main() -> None:
        async with together(DENSE, ROLLOUT) as one:
            await one.swap(1, newer)
            wanted = await all_of(one)
        async with apart(DENSE, ROLLOUT) as (engine, prefill, decode):
            await all_of(engine)
            running = [asyncio.create_task(all_of(engine)) for _ in range(2)]
            await asyncio.sleep(0.02)
            swapping = asyncio.create_task(engine.swap(1, newer))
            await asyncio.sleep(0)
            found = await all_of(engine)  # came while weights were changed
            await swapping
            assert prefill.version == decode.version == engine.version == 1
            assert all(map(same, found, wanted))
            assert all(map(same, await all_of(engine), wanted))
            await asyncio.gather(*running)

    asyncio.run(main())


def test_pages_on_their_way_when_weights_change_are_refused() -> None:
    newer = weights(DENSE, 1)

    async def main() -> None:
        async with together(DENSE, ROLLOUT) as one:
            await one.swap(1, newer)
            wanted = await complete(one, ask(PROMPTS[5], seed=3, max_tokens=8))
        async with apart(DENSE, ROLLOUT) as (engine, prefill, decode):
            export = prefill.export_prefix

            async def then_swapped(ids: np.ndarray, start: int = 0) -> Any:
                found = await export(ids, start)
                await decode.swap(1, newer)
                return found

            prefill.export_prefix = then_swapped  # type: ignore[method-assign]
            found = await complete(engine, ask(PROMPTS[5], seed=3, max_tokens=8))
            assert engine.stats()["moved_refused"] == 1
            assert same(found, wanted)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(1))
def test_callers_may_leave_at_any_moment(seed: int) -> None:
    async def main() -> None:
        rng = np.random.default_rng(seed)
        async with apart(DENSE, ROLLOUT) as (engine, _, _):
            tasks = []
            for n in range(24):
                ids = rng.integers(0, 9, rng.integers(1, 26)).astype(np.int32)
                tasks.append(asyncio.create_task(complete(engine, ask(ids, seed=n, max_tokens=6))))
                await asyncio.sleep(rng.uniform(0, 0.01))
                if rng.random() < 0.6:
                    tasks[rng.integers(len(tasks))].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(x, Completion | asyncio.CancelledError) for x in ended)
            assert sum(isinstance(x, Completion) for x in ended) >= 5

    asyncio.run(main())


def test_without_a_prefix_cache_nothing_could_move() -> None:
    with pytest.raises(UserError, match="prefix_cache=False"):
        DisaggregatedEngine([], [], replace(ROLLOUT, prefix_cache=False))


def test_streams_wait_for_no_more_than_a_page_of_a_prompt() -> None:
    sizes = RolloutConfig(slots=2, context=64, page=16, chunk=64)
    assert decoding(sizes) == replace(sizes, chunk=16)
