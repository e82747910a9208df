"""Laws of the host side of the engine, on a device that checks who reads and writes what."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from checking_device import VOCAB
from hosted import TINY, Host, alone, prompts

from forge_jax.config import UPDATES, RolloutConfig
from forge_jax.rollout.scheduler import PREFILLS
from forge_jax.types import Finish, Request, Sampling


@pytest.mark.parametrize("mode", UPDATES)
@pytest.mark.parametrize("routes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_request_ends_once_with_what_it_gets_alone(
    mode: str, routes: bool, seed: int
) -> None:
    """Requests come, callers leave, weights change and pauses begin, with hardly any pages."""
    rng = random.Random(f"{mode}{routes}{seed}")
    places = max(1, seed - 2)
    pages = rng.choice([8, 9, 12, 17, 40]) * places
    options = {"deterministic": seed == 2, "prefix_cache": seed != 3}
    cfg = RolloutConfig(
        slots=rng.choice([3, 8]) * places, context=24, page=4, chunk=8,
        decode_steps=rng.choice([1, 3, 5]), pages=pages, places=places, routes=routes,
        prompt_logprobs=3, **options,
    )  # fmt: skip
    host = Host(cfg)
    for _ in range(400):
        event = rng.random()
        if event < 0.35:
            host.submit(
                prompts(rng),
                seed=rng.randrange(5),
                choice=rng.randrange(3),
                max_tokens=rng.choice([None, 1, 2, 9]),
                prompt_logprobs=rng.choice([None, None, None, 1, 3]),
            )
        elif event < 0.42 and host.requests:
            host.abandon(rng.choice([*host.requests]))
        elif event < 0.46:
            host.update(mode)
        elif event < 0.48:
            host.scheduler.paused = not host.scheduler.paused and mode != "wait"
        host.round(ahead=rng.random() < 0.8)
        host.scheduler.paused &= rng.random() < 0.7
    host.scheduler.paused = False
    host.finish()
    host.check()
    host.idle()
    assert len(host.requests) > 50


@pytest.mark.parametrize("group", [1, 8])
def test_with_pages_for_one_sequence_and_one_more_64_requests_finish(group: int) -> None:
    cfg = RolloutConfig(slots=8, context=24, page=4, chunk=8, decode_steps=3, pages=8)
    host = Host(cfg)
    for number in range(64):
        beginning = np.random.default_rng(number // group).integers(2, VOCAB, 9)
        host.submit(beginning.astype(np.int32), seed=number, max_tokens=15)
    host.finish()
    host.check()
    host.idle()
    assert host.scheduler.counts["preemptions"] > 0


def test_a_group_computes_its_prefix_once_and_sits_in_one_bundle() -> None:
    cfg = RolloutConfig(slots=16, context=64, page=4, chunk=16, decode_steps=3)
    host = Host(cfg)
    for number in range(16):
        shared = np.random.default_rng(number % 2).integers(2, VOCAB, 40)
        host.submit(np.array([*shared, 2 + number, 3, 4], np.int32), seed=number)
    most = 0
    while host.round():
        decode = host.unread[-1].plan.decode if host.unread else None
        owners = () if decode is None else decode.owners
        for first in range(0, len(owners), cfg.bundle):
            stays = [stay for stay in owners[first : first + cfg.bundle] if stay is not None]
            assert len({stay.job.number % 2 for stay in stays}) <= 1
            if len(stays) > 1:
                assert decode is not None
                assert decode.shape.shared >= 10, "the ten pages of a group are read once"
                most = max(most, len(stays))
    host.check()
    counts = host.scheduler.counts
    assert counts["prefill_tokens"] == 2 * 40 + 16 * 2, "the last token of a prompt is no prefill's"
    assert counts["cached_tokens"] == 14 * 40
    cached = Counter(host.chunks[number][0].cached_tokens for number in host.requests)
    assert cached == {0: 2, 40: 14}
    assert most == cfg.bundle


@pytest.mark.parametrize("mode", UPDATES)
def test_versions_change_at_the_boundary_and_no_new_request_reads_the_old(mode: str) -> None:
    """Half of the requests run when the weights change; then the same prompts come again."""
    cfg = RolloutConfig(slots=4, context=64, page=4, chunk=16, decode_steps=2, routes=True)
    host = Host(cfg)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, VOCAB, 17).astype(np.int32) for _ in range(4)]
    seeds = [s for s in range(999) if len(alone_of(texts[0], s, cfg)) > 30][:8]
    old = [host.submit(text, seed=s) for text, s in zip(texts, seeds[:4], strict=True)]
    for _ in range(6):
        host.round()
    begun = {n: sum(len(c.ids) for c in host.chunks[n]) for n in old}
    assert all(begun.values())
    unread = len(host.unread)
    host.update(mode)
    new = [host.submit(text, seed=s) for text, s in zip(texts, seeds[4:], strict=True)]
    host.finish()
    host.check()
    for number in old:
        versions = np.concatenate([chunk.versions for chunk in host.chunks[number]])
        zeros = int((versions == 0).sum())
        if mode == "keep":
            assert zeros == begun[number] + unread * cfg.decode_steps
        elif mode == "recompute":
            assert zeros == begun[number], "what was not read yet is drawn again"
        elif mode == "wait":
            assert zeros == len(versions)
        else:
            assert host.chunks[number][-1].finish is Finish.ABORT
            assert zeros == begun[number] == len(versions)
    for number in new:
        if mode != "recompute":  # else the old ones have computed it again by then
            assert host.chunks[number][0].cached_tokens == 0
        assert {v for c in host.chunks[number] for v in c.versions} == {1}
    again = host.submit(texts[0], seed=1)
    host.finish()
    assert host.chunks[again][0].cached_tokens == 16
    host.idle()


@pytest.mark.parametrize("mode", UPDATES)
def test_an_update_between_two_spans_of_a_prompt_starts_its_log_probs_again(mode: str) -> None:
    cfg = dataclasses.replace(TINY, pages=70, prompt_logprobs=1, decode_steps=1)
    host = Host(cfg)
    for number in range(cfg.slots - 1):  # so many decode that a round reads one span
        host.submit(np.array([2 + number], np.int32), seed=number, ignore_eos=True)
    for _ in range(3):
        host.round()
    prompt = np.arange(2, 22, dtype=np.int32)
    number = host.submit(prompt, prompt_logprobs=1, max_tokens=2)
    host.round()
    [stay] = [stay for stay in host.scheduler._stays.values() if stay.job.number == number]
    assert 0 < stay.filled < stay.target
    host.update(mode)
    host.finish()
    host.check()
    told = host.chunks[number][0].prompt
    assert (told is None) == (mode == "abort")
    host.idle()


def alone_of(text: np.ndarray, seed: int, cfg: RolloutConfig) -> list[int]:
    return alone(Request(prompt=text, sampling=Sampling(seed=seed)), cfg.context)


def test_the_next_call_of_a_conversation_reads_what_the_last_one_decoded() -> None:
    cfg = RolloutConfig(slots=2, context=64, page=4, chunk=16, decode_steps=3, routes=True)
    host = Host(cfg)
    text = np.arange(2, 12, dtype=np.int32)
    seed = next(s for s in range(99) if len(alone_of(text, s, cfg)) > 20)
    first = host.submit(text, seed=seed, max_tokens=20)
    host.finish()
    ids = np.concatenate([chunk.ids for chunk in host.chunks[first]])
    second = host.submit(np.array([*text, *ids, 7, 8], np.int32), seed=seed)
    host.finish()
    host.check()
    assert host.chunks[second][0].cached_tokens == 28, "of 30, the last of which was never fed"


def test_who_waits_for_a_prefill_takes_it_over_when_it_is_aborted() -> None:
    host = Host(RolloutConfig(slots=3, context=32, page=4, chunk=4, decode_steps=1))
    host.submit(np.array([9], np.int32), ignore_eos=True)
    host.round()  # while this one decodes a prefill takes several rounds
    first, second = (host.submit(np.arange(2, 32, dtype=np.int32), seed=n) for n in range(2))
    host.round()
    assert (host.scheduler.running, host.scheduler.waiting) == (2, 1)
    host.abandon(first)
    host.finish()
    host.check()
    assert host.chunks[second][-1].finish is not None


def test_requests_that_come_together_are_decoded_together() -> None:
    host = Host(RolloutConfig(slots=8, context=40, page=4, chunk=8, decode_steps=4))
    prompts = np.random.default_rng(0).integers(2, VOCAB, (8, 25)).astype(np.int32)
    for prompt in prompts:
        host.submit(prompt, max_tokens=8, ignore_eos=True)
    host.finish()
    host.check()
    counts = host.scheduler.counts
    assert counts["prefill_calls"] == 8 * 3 > PREFILLS
    assert counts["decode_calls"] == 2, "no call decodes while the others' prompts are missing"


def test_whoever_has_a_token_waits_for_few_prompts() -> None:
    host = Host(RolloutConfig(slots=8, context=40, page=4, chunk=8, decode_steps=4))
    host.submit(np.array([9], np.int32), ignore_eos=True)
    host.round()
    for prompt in np.random.default_rng(0).integers(2, VOCAB, (7, 25)).astype(np.int32):
        host.submit(prompt, max_tokens=8, ignore_eos=True)
    host.round()
    assert host.scheduler.counts["decode_calls"] == 2
    assert 0 < host.scheduler.counts["prefill_calls"] <= PREFILLS
    host.finish()
    host.check()
