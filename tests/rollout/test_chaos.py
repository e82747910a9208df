"""Whatever happens around an engine with hardly any pages: callers that come, leave and ask for
all kinds of settings, new weights and pauses of every mode, stores that fail, drafts.

    CHAOS_SECONDS=300 CHAOS_SEED=7 python -m pytest tests/rollout/test_chaos.py
"""

import asyncio
import dataclasses
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from chaos import STOP, Seen, Storm
from faulty_store import Faulty
from small_engine import BYTES, log_softmax, serving, teacher_logits, weights_of

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import lower
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.tiers.store import Patience
from forge_jax.types import Finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SECONDS = float(os.environ.get("CHAOS_SECONDS", "4"))
LEAST = 300  # requests
SEED = int(os.environ.get("CHAOS_SEED", "0"))
CFG = ModelConfig(
    family="qwen3", vocab=264, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24,
    rope_theta=1e4, norm_eps=1e-6, tied=False, max_context=64, mtp=2, init_std=0.3,
)  # fmt: skip
QUIET = RolloutConfig(
    slots=4, context=48, page=12, chunk=12, decode_steps=2, shaping=True, prompt_logprobs=2
)
TROUBLED = dataclasses.replace(QUIET, pages=7, drafts=1, host_pages=6, store="faulty")
FLIPS = 2e-3  # share of tokens that rounding may draw differently, where two are nearly as likely


@asynccontextmanager
async def engine_of(rollout: RolloutConfig) -> AsyncIterator[RolloutEngine]:
    with ThreadPoolExecutor(1) as device:
        engine = RolloutEngine(CFG, weights_of(CFG, 0), (STOP,), rollout, BYTES, device)
        scheduler = engine._scheduler

        def audited(work: Callable[..., Any]) -> Callable[..., Any]:
            def worked(*args: Any) -> Any:
                found = work(*args)
                scheduler.audit()
                return found

            return worked

        scheduler.plan = audited(scheduler.plan)
        scheduler.apply = audited(scheduler.apply)
        yield engine


async def storm(rollout: RolloutConfig, faulty: Faulty) -> tuple[list[Seen], dict[str, float]]:
    async with engine_of(rollout) as engine:
        await engine.warm_up()
        task = asyncio.create_task(engine.serve())
        made = Storm(engine, CFG, faulty, SEED)
        async with asyncio.timeout(SECONDS + 300):
            await made.run(SECONDS, LEAST)
        stats = dict(engine.stats())
        task.cancel()
        [ended] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        for memory in engine._scheduler.places.all:
            assert memory.tree.locked == 0
            assert memory.pool.free + memory.tree.evictable == memory.pool.total
    return made.seen, stats


async def alone(found: list[Seen]) -> list[list[int]]:
    """What a quiet engine says to the same requests, under the weights that they began with."""
    said: dict[int, list[int]] = {}
    by_weights = defaultdict(list)
    for i, seen in enumerate(found):
        by_weights[seen.began % 3].append(i)
    async with engine_of(QUIET) as engine, serving(engine):

        async def one(i: int) -> None:
            chunks = [chunk async for chunk in engine.generate(found[i].request)]
            said[i] = np.concatenate([chunk.ids for chunk in chunks]).tolist()

        for version, which in by_weights.items():
            await engine.swap(engine.version + 1, weights_of(CFG, version))
            await asyncio.gather(*(one(i) for i in which))
    return [said[i] for i in range(len(found))]


def check_ends(found: list[Seen], stats: dict[str, float]) -> None:
    """Every request ended once, and the engine has counted each once."""
    for seen in found:
        ends = [chunk.finish is not None for chunk in seen.chunks]
        assert not any(ends[:-1])
        assert any(ends) or seen.left
    assert stats["requests_running"] == stats["requests_waiting"] == 0
    assert stats["requests_submitted"] == sum(stats[f"requests_{f}"] for f in Finish)


def check_logprobs(found: list[Seen], single: bool) -> None:
    """Log-probs are those of the whole sequence read at once, by the weights that are told; where
    `single`, only those of prompts and of requests that met one version, since others have keys
    of several."""
    for seen in found:
        ids, versions, prompt = seen.joint("ids"), seen.joint("versions"), seen.request.prompt
        if not len(ids):
            continue
        assert (np.diff(versions) >= 0).all()
        whole, told, raw = (
            [*prompt.tolist(), *ids.tolist()],
            seen.chunks[0].prompt,
            seen.joint("raw"),
        )
        for version in {*versions.tolist()}:
            params = weights_of(CFG, version % 3)
            rows = log_softmax(teacher_logits(params, whole, QUIET.context, CFG))
            own = rows[np.arange(len(whole) - 1), whole[1:]]
            if told is not None and versions[0] == version:
                np.testing.assert_allclose(told.logprobs, own[: len(prompt) - 1], atol=1e-4)
            if not single or {seen.began} == {*versions.tolist()}:
                here = versions == version
                np.testing.assert_allclose(raw[here], own[len(prompt) - 1 :][here], atol=1e-4)


@pytest.mark.parametrize(
    ("speculate", "update"),
    [("mtp", "keep"), ("mtp", "wait"), ("ngram", "recompute"), ("ngram", "abort")],
)
def test_every_request_ends_once_with_what_a_quiet_engine_says(
    speculate: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty()
    patience = Patience(base=0.05, per_ki=0.0, write=0.1, failures=3, rest=0.2)
    monkeypatch.setattr(lower, "open_store", lambda location: (faulty, 0.0))
    monkeypatch.setattr(lower, "Patience", lambda: patience)
    rollout = dataclasses.replace(TROUBLED, speculate=speculate, update=update)
    found, stats = asyncio.run(storm(rollout, faulty))
    check_ends(found, stats)
    check_logprobs(found, single=update == "keep")
    within = [seen for seen in found if {*seen.joint("versions").tolist()} == {seen.began}]
    said = asyncio.run(alone(within))
    flips = 0
    for seen, want in zip(within, said, strict=True):
        ids = seen.joint("ids").tolist()
        ended = seen.chunks[-1].finish in (Finish.STOP, Finish.LENGTH)
        flips += ids != (want if ended else want[: len(ids)])
    tokens = sum(len(seen.joint("ids")) for seen in within)
    print(f"{len(within)} requests of {tokens} tokens within one version, {flips} differ")
    assert flips <= FLIPS * tokens
    assert len(within) > 10
    for what in ("preemptions", "requests_abort", "swaps", "draft_tokens", "tier_host_hits"):
        assert stats[what] > 0, what
    faults = ("corrupt", "read_failures", "read_timeouts", "write_failures")
    assert sum(stats[f"tier_store_{fault}"] for fault in faults) > 0
    assert stats["tier_faults"] == 0
