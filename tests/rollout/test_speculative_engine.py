"""An engine that drafts says what one says that does not, and tells how it went."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from small_engine import BYTES, Completion, ask, complete, serving
from test_drafting import CFG

from forge_jax.config import RolloutConfig, UserError
from forge_jax.models import layout
from forge_jax.rollout.engine import RolloutEngine

OFF = RolloutConfig(slots=4, context=32, page=8, chunk=16, decode_steps=2, pages=14)
MTP, NGRAM = (dataclasses.replace(OFF, speculate=kind, drafts=2) for kind in ("mtp", "ngram"))


def shaped() -> list[Any]:
    """Requests that change their logits, of which some end early."""
    rng = np.random.default_rng(1)
    settings: list[dict[str, Any]] = [
        {"max_tokens": 3, "presence_penalty": 1.0},
        {"max_tokens": 7, "top_k": 4},
        {"max_tokens": 2, "logit_bias": ((5, 4.0),), "temperature": 0.0},
    ]
    prompts = [rng.integers(0, CFG.vocab, 9).astype(np.int32) for _ in settings]
    return [ask(p, seed=9, **s) for p, s in zip(prompts, settings, strict=True)]


def requests() -> list[Any]:
    """More than there are slots and pages for, some of one prompt, of all settings."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CFG.vocab, n).astype(np.int32) for n in (1, 9, 17, 9)]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "choice": 1},
        {"stop_ids": (3,)},
        {"max_tokens": 5, "choice": 2},
    ]
    return [ask(p, seed=i, **s) for i, s in enumerate(settings) for p in prompts]


async def mixed(rollout: RolloutConfig) -> tuple[list[Completion], dict[str, float]]:
    """Shaped requests that come while plain ones are drafted, and end before these do."""
    with ThreadPoolExecutor(1) as device:
        params = layout.init(CFG, jax.random.key(4))
        engine = RolloutEngine(CFG, params, (), rollout, BYTES, device)
        async with serving(engine):
            plain = [asyncio.create_task(complete(engine, r)) for r in requests()[:3]]
            found = []
            for request in shaped():
                before = engine.stats()["draft_tokens"]
                while engine.stats()["draft_tokens"] == before and not all(
                    task.done() for task in plain
                ):
                    await asyncio.sleep(0)
                found.append(await complete(engine, request))
            return [*await asyncio.gather(*plain), *found], dict(engine.stats())


async def said(rollout: RolloutConfig) -> tuple[list[Completion], dict[str, float]]:
    with ThreadPoolExecutor(1) as device:
        params = layout.init(CFG, jax.random.key(4))
        engine = RolloutEngine(CFG, params, (), rollout, BYTES, device)
        async with serving(engine):
            found = await asyncio.gather(*(complete(engine, r) for r in requests()))
            again = await asyncio.gather(*(complete(engine, r) for r in requests()[:4]))
        return [*found, *again], dict(engine.stats())


@pytest.fixture(scope="module")
def off() -> list[Completion]:
    return asyncio.run(said(OFF))[0]


@pytest.mark.parametrize("rollout", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_on_is_off(off: list[Completion], rollout: RolloutConfig) -> None:
    found, stats = asyncio.run(said(rollout))
    for one, other in zip(found, off, strict=True):
        assert (one.ids, one.finish) == (other.ids, other.finish)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert stats["draft_tokens"] > 0
    assert 0 <= stats["accepted_tokens"] <= stats["draft_tokens"]
    if rollout is NGRAM:  # the same greedy requests again: what was said before is drafted
        assert stats["accepted_tokens"] > 0


def test_more_drafts_than_modules_are_refused() -> None:
    rollout = dataclasses.replace(MTP, drafts=4)
    with (
        ThreadPoolExecutor(1) as device,
        pytest.raises(UserError, match=r"drafts=4 with .*=mtp: the model has 3"),
    ):
        RolloutEngine(CFG, {}, (), rollout, BYTES, device)
