"""An engine that drafts says what one says that does not, and tells how it went."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from small_engine import BYTES, Completion, ask, complete, log_softmax, serving
from test_drafting import CFG, whole

from forge_jax.config import RolloutConfig, UserError
from forge_jax.models import layout, transformer
from forge_jax.rollout import packets
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.jobs import Limits, job_of
from forge_jax.rollout.ngram import NOTHING
from forge_jax.rollout.packets import Sampled
from forge_jax.rollout.plans import Results
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.types import Finish, Grammar

OFF = RolloutConfig(slots=4, context=32, page=8, chunk=16, decode_steps=2, pages=14)
MTP, NGRAM = (dataclasses.replace(OFF, speculate=kind, drafts=2) for kind in ("mtp", "ngram"))


def shaped() -> list[Any]:
    """Requests that change their logits, of which some end early."""
    rng = np.random.default_rng(1)
    settings: list[dict[str, Any]] = [
        {"max_tokens": 3, "presence_penalty": 1.0},
        {"max_tokens": 7, "top_k": 4},
        {"max_tokens": 2, "logit_bias": ((5, 4.0),), "temperature": 0.0},
        {"top_p": 0.6, "frequency_penalty": 0.5, "choice": 1},
        {"min_p": 0.1, "repetition_penalty": 1.3, "temperature": 0.7},
        {"stop_ids": tuple(range(0, CFG.vocab, 3)), "min_tokens": 6},
        {"grammar": Grammar(kind="regex", text=r"[\x05-\x09]{2,4}\x0b\x0c")},
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


def mixed() -> list[Any]:
    """Plain requests with shaped ones between them."""
    plain = requests()
    return [*plain[:6], shaped()[0], *plain[6:11], *shaped()[1:], *plain[11:]]


def stopped(plain: list[Completion]) -> tuple[list[Any], list[list[int]]]:
    """`requests` with stop strings that lie across two tokens of what they say, after two calls
    or so, and what they say up to there."""
    asked, ends = [], []
    for request, said in zip(requests(), plain, strict=False):
        if len(said.ids) > 6:
            pair = said.ids[5:7]
            first = next(i for i in range(len(said.ids)) if said.ids[i : i + 2] == pair)
            sampling = dataclasses.replace(request.sampling, stop=("".join(map(chr, pair)),))
            asked.append(dataclasses.replace(request, sampling=sampling))
            ends.append(said.ids[: first + 2])
    assert len(asked) > 5
    return asked, ends


def check_same(found: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(found, others, strict=True):
        assert (one.ids, one.finish) == (other.ids, other.finish)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


async def said(
    rollout: RolloutConfig, asked: list[Any]
) -> tuple[list[Completion], dict[str, float]]:
    with ThreadPoolExecutor(1) as device:
        params = layout.init(CFG, jax.random.key(4))
        engine = RolloutEngine(CFG, params, (0,), rollout, BYTES, device)
        async with serving(engine):
            found = await asyncio.gather(*(complete(engine, r) for r in asked))
            again = await asyncio.gather(*(complete(engine, r) for r in asked[:4]))
        return [*found, *again], dict(engine.stats())


@pytest.fixture(scope="module")
def off() -> list[Completion]:
    return asyncio.run(said(OFF, requests()))[0]


@pytest.fixture(scope="module")
def off_mixed() -> list[Completion]:
    return asyncio.run(said(dataclasses.replace(OFF, shaping=True), mixed()))[0]


@pytest.mark.parametrize("rollout", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_on_is_off(off: list[Completion], rollout: RolloutConfig) -> None:
    asked, ends = stopped(off)
    found, stats = asyncio.run(said(rollout, [*requests(), *asked]))
    plain = len(requests())
    check_same([*found[:plain], *found[plain + len(asked) :]], off)
    for one, ids in zip(found[plain:], ends, strict=False):
        assert (one.ids, one.finish, one.stop_text) == (ids, Finish.STOP, one.stop_text)
        assert one.stop_text == "".join(map(chr, ids[-2:]))
    assert stats["draft_tokens"] > 0
    assert 0 <= stats["accepted_tokens"] <= stats["draft_tokens"]
    if rollout is NGRAM:  # the same greedy requests again: what was said before is drafted
        assert stats["accepted_tokens"] > 0


@pytest.mark.parametrize("rollout", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_on_is_off_where_some_change_their_logits(
    off_mixed: list[Completion], rollout: RolloutConfig
) -> None:
    found, stats = asyncio.run(said(dataclasses.replace(rollout, shaping=True), mixed()))
    check_same(found, off_mixed)
    assert stats["draft_tokens"] > 0


def test_after_an_update_drafts_are_those_of_an_engine_that_began_with_the_weights() -> None:
    """Also where the prompt was cached before, and of requests that run across it."""
    rollout = dataclasses.replace(MTP, deterministic=True, update="recompute", pages=None)
    old, new = (layout.init(CFG, jax.random.key(seed)) for seed in (4, 5))
    asked = [one for one in requests() if one.sampling.max_tokens is None][:6]

    async def counted(engine: RolloutEngine) -> dict[str, float]:
        before = dict(engine.stats())
        await asyncio.gather(*(complete(engine, one) for one in asked))
        told = ("drafts", "draft_tokens_1", "accepted_tokens_1", "accepted_tokens_2")
        return {name: engine.stats().get(name, 0) - before.get(name, 0) for name in told}

    async def run() -> None:
        with ThreadPoolExecutor(1) as device:
            engine = RolloutEngine(CFG, old, (), rollout, BYTES, device)
            async with serving(engine):
                of_old = await counted(engine)
                running = asyncio.create_task(complete(engine, ask(asked[0].prompt, seed=9)))
                await asyncio.sleep(0)
                await engine.swap(1, new)
                await running
                of_new = await counted(engine)
            fresh = RolloutEngine(CFG, new, (), rollout, BYTES, device)
            async with serving(fresh):
                assert await counted(fresh) == of_new != of_old
            assert {"calls_of_2"} == {n for n in engine.stats() if n.startswith("calls_of_")}

    asyncio.run(run())


def cut(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities of what is left of `logits` [..., V], by the book."""
    p = np.exp(log_softmax(logits))
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, axis=-1)
    left = (np.cumsum(ranked, axis=-1) - ranked < top_p) & (np.arange(p.shape[-1]) < top_k)
    kept = np.zeros_like(p)
    np.put_along_axis(kept, order, np.where(left, ranked, 0), axis=-1)
    return kept / kept.sum(-1, keepdims=True)


def test_tokens_have_their_exact_distribution_whatever_drafts_and_truncates() -> None:
    """The first two tokens of many requests, of plain ones, which are drafted, and of truncated
    ones, against the probabilities of the model on whole sequences."""
    n, start = 400, np.array([3, 1, 4, 1, 5], np.int32)
    settings = ({"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.7, "temperature": 0.8})
    plain, *truncated = [
        [ask(start, seed=i, max_tokens=3, ignore_eos=True, **one) for i in range(n)]
        for one in settings
    ]
    always = dataclasses.replace(MTP, deterministic=True, pages=None)
    drafted, stats = asyncio.run(said(always, plain))
    assert stats["accepted_tokens"] > 0.02 * n
    rollout = dataclasses.replace(MTP, shaping=True)
    cut_short, _ = asyncio.run(said(rollout, [one for many in truncated for one in many]))
    found = [*drafted[:n], *cut_short]
    params = layout.init(CFG, jax.random.key(4))
    after = np.array([[*start, word] for word in range(CFG.vocab)])
    logits = np.stack(
        [transformer.logits(params, whole(params, row, CFG)[0], CFG) for row in after]
    )
    for place, one in enumerate(settings):
        warm = logits / one.get("temperature", 1.0)
        limits = int(one.get("top_k", CFG.vocab)), one.get("top_p", 1.0)
        exact = cut(warm[0, len(start) - 1], *limits)[:, None] * cut(warm[:, -1], *limits)
        seen = np.zeros_like(exact)
        for completion in found[place * n : (place + 1) * n]:
            seen[tuple(completion.ids[:2])] += 1
        assert not seen[exact == 0].any()
        often = exact * n >= 5
        expected = np.append(exact[often], exact[~often].sum()) * n
        found_here = np.append(seen[often], seen[~often].sum())
        chi2 = ((found_here - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
        free = len(expected) - 1
        assert chi2 < free + 5 * np.sqrt(2 * free), one  # five standard deviations


def test_a_drafter_is_told_what_a_shaped_call_sampled() -> None:
    rollout = dataclasses.replace(NGRAM, shaping=True)
    scheduler = Scheduler(rollout, b"0", CFG.vocab)
    limits = Limits(context=rollout.context, vocab=CFG.vocab, stop_ids=())
    prompt, steps = np.array([7], np.int32), rollout.decode_steps
    asked = ask(prompt), ask(prompt, top_k=3, max_tokens=steps)
    for number, request in enumerate(asked):
        scheduler.submit(job_of(request, limits, number, (0, number), None, 0.0))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.decode is not None
    assert plan.decode.shape.shaped
    packet = np.zeros((steps, 1, rollout.slots, 4), np.int32)
    packet[:, 0, :, packets.SAMPLED] = 11 + np.arange(steps)[:, None]
    packet[:, 0, :, packets.STATUS] = packets.GOES_ON
    [shaped] = [s.slot for s in plan.decode.owners if s is not None and s.job.number == 1]
    packet[-1, 0, shaped, packets.STATUS] = packets.EXHAUSTED
    block = Sampled(packet, None)
    scheduler.apply(
        Results(plan=plan, version=0, began=0.0, ended=0.0, routes=(), scores=(), block=block)
    )
    after = scheduler.plan()
    assert after is not None
    assert after.decode is not None
    assert not after.decode.shape.shaped
    [slot] = [s.slot for s in after.decode.owners if s is not None]
    shape = after.decode.shape
    header = after.decode.packet[slot * (packets.HEADER + shape.own) :]
    assert header[packets.STATE] == packets.FRESH
    own = after.decode.packet[-shape.rows * 2 * rollout.context :].reshape(shape.rows, 2, -1)
    known = [7, *range(11, 11 + steps)]
    assert own[slot, 1].tolist() == known + [NOTHING] * (rollout.context - len(known))


def test_a_call_without_drafts_reads_no_more_pages_where_there_might_be_some() -> None:
    deep = dataclasses.replace(NGRAM, drafts=8, page=4, pages=None)
    shapes = []
    for rollout in (deep, dataclasses.replace(deep, speculate="off")):
        scheduler = Scheduler(rollout, b"0", CFG.vocab)
        limits = Limits(context=rollout.context, vocab=CFG.vocab, stop_ids=())
        request = ask(np.arange(3, dtype=np.int32), max_tokens=20)
        scheduler.submit(job_of(request, limits, 0, (0, 0), None, 0.0))
        plan = scheduler.plan()
        assert plan is not None
        assert plan.decode is not None
        shapes.append(plan.decode.shape)
    assert shapes[0] == shapes[1]


def test_more_drafts_than_modules_are_refused() -> None:
    rollout = dataclasses.replace(MTP, drafts=4)
    with (
        ThreadPoolExecutor(1) as device,
        pytest.raises(UserError, match=r"drafts=4 with .*=mtp: the model has 3"),
    ):
        RolloutEngine(CFG, {}, (), rollout, BYTES, device)
