"""An engine above host memory and a store: what it reads there changes no token."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from faulty_store import Faulty
from small_engine import Completion, ask, idle_engine, serving, weights

from forge_jax.config import RolloutConfig, UserError
from forge_jax.rollout import lower
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.tiers.store import Patience

PLAIN = RolloutConfig(slots=4, context=64, page=4, chunk=32, decode_steps=4)
TINY = replace(PLAIN, slots=2, pages=40)
SHARED = np.arange(40, dtype=np.int32)


def prompt(tail: int, length: int = 3) -> np.ndarray:
    """Ten shared pages, and a few tokens of its own."""
    return np.concatenate([SHARED, np.full(length, 100 + tail, np.int32)])


async def told(engine: RolloutEngine, ids: np.ndarray) -> tuple[Completion, int]:
    """A completion, and how many tokens of its prompt were read from a cache."""
    chunks = [c async for c in engine.generate(ask(ids, seed=7, max_tokens=6))]
    assert chunks[-1].finish is not None
    whole = Completion(
        ids=np.concatenate([c.ids for c in chunks]).tolist(),
        logprobs=np.concatenate([c.logprobs for c in chunks]),
        versions=np.concatenate([c.versions for c in chunks]).tolist(),
        finish=chunks[-1].finish,
        stop_text=None,
    )
    return whole, chunks[0].cached_tokens


async def settled(engine: RolloutEngine) -> dict[str, float]:
    async with asyncio.timeout(30):
        while engine.stats()["tier_pages_pending"]:
            await asyncio.sleep(0.01)
    assert engine.stats()["tier_faults"] == 0
    return dict(engine.stats())


def run(rollout: RolloutConfig, body: Callable[[RolloutEngine], Any], params: Any = None) -> Any:
    """What `body` gives with an engine that serves; every page has one place at the end."""

    async def main() -> Any:
        async with idle_engine(rollout, params=params) as engine, serving(engine):
            found = await body(engine)
            engine._scheduler.audit()
            return found

    return asyncio.run(main())


async def warm(engine: RolloutEngine) -> list[Completion]:
    """Three requests one after the other: the shared pages are hit twice."""
    found = [(await told(engine, prompt(tail)))[0] for tail in range(3)]
    await asyncio.sleep(0)
    await told(engine, prompt(9))  # a plan after the hits, with which the pages go down
    await settled(engine)
    return found


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    async def body(engine: RolloutEngine) -> list[Completion]:
        return [(await told(engine, prompt(tail)))[0] for tail in range(3)]

    return run(replace(PLAIN, prefix_cache=False), body)


def same(a: Completion, b: Completion) -> bool:
    return a.ids == b.ids and np.allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("host", [0, 64])
def test_another_engine_reads_the_prefix_from_the_store(
    tmp_path: Path, host: int, expected: list[Completion]
) -> None:
    rollout = replace(PLAIN, store=str(tmp_path), host_pages=host)
    assert all(map(same, run(rollout, warm), expected))

    async def second(engine: RolloutEngine) -> None:
        found, cached = await told(engine, prompt(1))
        assert cached == 40
        assert same(found, expected[1])
        stats = await settled(engine)
        assert stats["tier_store_hits"] == 10
        assert stats["tier_store_bytes_read"] > 0
        assert stats["tokens_prefilled"] == len(prompt(1)) - 1 - 40

    run(rollout, second)


@pytest.mark.parametrize("change", ["weights", "dtype", "page"])
def test_other_weights_dtype_or_pages_find_nothing(tmp_path: Path, change: str) -> None:
    rollout = replace(PLAIN, store=str(tmp_path))
    run(rollout, warm)
    others = {"dtype": replace(rollout, dtype="bfloat16"), "page": replace(rollout, page=8)}

    async def second(engine: RolloutEngine) -> None:
        assert (await told(engine, prompt(1)))[1] == 0
        stats = await settled(engine)
        assert stats["tier_store_hits"] == stats["tier_store_corrupt"] == 0, "a key of its own"

    params = weights()
    if change == "weights":  # by one bit of one number
        bits = np.array(params["embed"]).view(np.uint32)
        bits[0, 0] ^= 1
        params = {**params, "embed": jax.device_put(bits.view(np.float32))}
    run(others.get(change, rollout), second, params)


def test_equal_bits_are_found_bit_by_bit_in_deterministic_mode(tmp_path: Path) -> None:
    rollout = replace(PLAIN, deterministic=True)
    cold = run(rollout, lambda engine: told(engine, prompt(1)))[0]
    run(replace(rollout, store=str(tmp_path)), warm)
    found, cached = run(
        replace(rollout, store=str(tmp_path)), lambda engine: told(engine, prompt(1))
    )
    assert cached == 40
    assert found.ids == cold.ids
    assert found.logprobs.tobytes() == cold.logprobs.tobytes()


@pytest.mark.parametrize("store", [False, True])
def test_nothing_of_older_weights_comes_back(tmp_path: Path, store: bool) -> None:
    rollout = replace(PLAIN, host_pages=64, store=str(tmp_path) if store else None)
    newer = jax.tree.map(lambda x: x * 1.5, weights())
    cold = run(PLAIN, lambda engine: told(engine, prompt(1)), newer)[0]

    async def body(engine: RolloutEngine) -> None:
        await warm(engine)
        await engine.swap(1, newer)
        assert (await settled(engine))["tier_host_pages"] == 0
        assert engine.stats()["tier_invalidated"] > 0
        found, cached = await told(engine, prompt(1))
        assert cached == 0
        assert same(found, cold)
        assert found.versions == [1] * len(found.ids)

    run(rollout, body)


def test_pages_that_come_after_an_update_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty()
    monkeypatch.setattr(lower, "open_store", lambda location: (faulty, 0.0))
    monkeypatch.setattr(lower, "Patience", lambda: Patience(base=60.0))
    rollout = replace(PLAIN, store="faulty")
    newer = jax.tree.map(lambda x: x * 1.5, weights())
    cold = run(PLAIN, lambda engine: told(engine, prompt(1)), newer)[0]
    run(rollout, warm)
    faulty.gate, before = threading.Event(), faulty.reads

    async def body(engine: RolloutEngine) -> None:
        coming = asyncio.create_task(told(engine, prompt(1)))
        while faulty.reads == before:
            await asyncio.sleep(0.001)
        await engine.swap(1, newer)
        assert faulty.gate is not None
        faulty.gate.set()
        found, cached = await coming
        assert cached == 0
        assert same(found, cold)
        assert found.versions == [1] * len(found.ids)

    run(rollout, body)


def test_pages_that_leave_the_device_come_back_from_the_host() -> None:
    async def body(engine: RolloutEngine) -> list[tuple[Completion, int]]:
        found = []
        for _ in range(3):
            for start in range(4):  # together more than the pool has
                ids = (np.arange(50, dtype=np.int32) + 50 * start) % 256
                found.append(await told(engine, ids))
                if "tier_faults" in engine.stats():
                    await settled(engine)
        return found

    without = run(replace(TINY, prefix_cache=False), body)
    found = run(replace(TINY, host_pages=200), body)
    assert all(same(a, b) for (a, _), (b, _) in zip(found, without, strict=True))
    assert [cached for _, cached in found[4:]] == [48] * 8


@pytest.mark.parametrize(
    "faults",
    [
        {"cut": 1},
        {"flip": 100},
        {"flip": -40},
        {"read_error": OSError("gone")},
        {"write_error": ValueError("full")},
        {"read_error": ValueError("gone"), "write_error": OSError("gone")},
        {"silent": True},
    ],
    ids=str,
)
def test_a_faulty_store_changes_no_token(
    faults: dict[str, Any], expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty()
    monkeypatch.setattr(lower, "open_store", lambda location: (faulty, 0.0))
    monkeypatch.setattr(lower, "Patience", lambda: Patience(base=0.05, per_ki=0.0, write=0.2))
    rollout = replace(PLAIN, store="faulty", host_pages=4)
    run(rollout, warm)
    assert len(faulty.names()) >= 10
    for name, value in faults.items():
        setattr(faulty, name, value)

    async def body(engine: RolloutEngine) -> dict[str, float]:
        together = await asyncio.gather(*(told(engine, prompt(tail)) for tail in (0, 1, 2)))
        assert all(same(found, want) for (found, _), want in zip(together, expected, strict=True))
        assert same((await told(engine, prompt(1)))[0], expected[1])
        await told(engine, prompt(5))
        return await settled(engine)

    stats = run(rollout, body)
    failures = ("corrupt", "read_failures", "read_timeouts", "write_failures")
    assert sum(stats[f"tier_store_{name}"] for name in failures) > 0 or "write_error" in faults


def test_abort_while_pages_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty(silent=True)
    monkeypatch.setattr(lower, "open_store", lambda location: (faulty, 0.0))
    monkeypatch.setattr(lower, "Patience", lambda: Patience(base=0.3, write=0.3))

    async def body(engine: RolloutEngine) -> None:
        tasks = [asyncio.create_task(told(engine, prompt(tail))) for tail in range(6)]
        while not faulty.reads:
            await asyncio.sleep(0.001)
        for task in tasks[:3]:
            task.cancel()
        assert len(await asyncio.gather(*tasks[3:])) == 3
        assert engine.stats()["requests_abort"] == 3

    run(replace(PLAIN, store="faulty"), body)


def test_a_store_that_cannot_be_opened_is_named_before_serving() -> None:
    async def main() -> None:
        async with idle_engine(replace(PLAIN, store="ftp://nowhere/x")) as engine:
            with pytest.raises(UserError, match="ftp://nowhere"):
                await engine.serve()

    asyncio.run(main())
    with pytest.raises(ValueError, match="prefix_cache=False"):
        replace(PLAIN, prefix_cache=False, host_pages=1)
