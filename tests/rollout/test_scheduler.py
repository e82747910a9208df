"""Laws of the host side of the engine, on a device that checks who reads and writes what."""

import dataclasses
import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from checking_device import VOCAB, FakeDevice, drawn

from forge_jax.config import UPDATES, RolloutConfig
from forge_jax.rollout.jobs import Limits, job_of
from forge_jax.rollout.plans import Plan, Results
from forge_jax.rollout.scheduler import PREFILLS, Scheduler
from forge_jax.types import Chunk, Finish, Request, Sampling

TINY = RolloutConfig(slots=8, context=24, page=4, chunk=8, decode_steps=3, pages=17)
STOPS = (0, 1)


class Host:
    """A scheduler, a device, and everything that has left them; one round is unread at most."""

    def __init__(self, cfg: RolloutConfig):
        self.cfg = cfg
        self.scheduler = Scheduler(cfg, b"0", VOCAB)
        self.device = FakeDevice(cfg, self.scheduler)
        self.chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
        self.requests: dict[int, Request] = {}
        self.gone: set[int] = set()
        self.born: dict[int, int] = {}  # version of the weights at the first prefill
        self.unread: list[Results] = []
        self.rounds = 0

    def submit(self, prompt: np.ndarray, **sampling: Any) -> int:
        number = len(self.requests)
        request = Request(prompt=prompt, sampling=Sampling(**sampling))
        limits = Limits(context=self.cfg.context, vocab=VOCAB, stop_ids=STOPS)
        seed = (0, sampling.get("seed", 0))
        self.scheduler.submit(job_of(request, limits, number, seed, None, 0.0))
        self.requests[number] = request
        return number

    def round(self, ahead: bool = True) -> bool:
        """Plans and dispatches a round, then reads the one before; False if idle."""
        oldest = min(self.scheduler._stays, default=None)
        plan: Plan | None = self.scheduler.plan()
        self.scheduler.audit()
        assert oldest is None or oldest in self.scheduler._stays, "the oldest was put back"
        if plan is not None:
            self.rounds += 1
            self.unread.append(self.device.run(plan, 0.0))
        elif not self.unread:
            return False
        while len(self.unread) > (1 if ahead and plan is not None else 0):
            self.take(self.scheduler.apply(self.unread.pop(0)))
            self.scheduler.audit()
        return True

    def finish(self) -> None:
        for _ in range(5000):
            if not self.round():
                break
        assert self.scheduler.running + self.scheduler.waiting == 0, "nothing moves any more"

    def take(self, chunks: list[tuple[int, Chunk]]) -> None:
        for number, chunk in chunks:
            assert number not in self.gone, "a chunk for a caller that has gone"
            self.chunks[number].append(chunk)

    def abandon(self, number: int) -> None:
        if not any(chunk.finish for chunk in self.chunks[number]):
            self.gone.add(number)
        self.scheduler.abandon(number)

    def update(self, mode: str) -> None:
        """What the engine does between two rounds."""
        while mode == "wait" and self.scheduler.running:
            self.scheduler.admitting = False
            self.round()
        self.scheduler.admitting = True
        self.device.version += 1
        if mode == "recompute":
            self.scheduler.retract()
        elif mode == "abort":
            self.take(self.scheduler.abort())
        self.scheduler.renew(b"%d" % self.device.version)

    def check(self) -> None:
        """Every request ended once, with what it gets alone, under versions that never fall."""
        for number, request in self.requests.items():
            chunks = self.chunks[number]
            if number in self.gone:
                assert all(chunk.finish is None for chunk in chunks)
                continue
            assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
            ids = np.concatenate([chunk.ids for chunk in chunks]).tolist()
            want = alone(request, self.cfg.context)
            if chunks[-1].finish is Finish.ABORT:
                assert ids == want[: len(ids)]
            else:
                assert ids == want
                stops = want[-1] in STOPS and not request.sampling.ignore_eos
                assert (chunks[-1].finish is Finish.STOP) == stops
            versions = np.concatenate([chunk.versions for chunk in chunks]).tolist()
            assert versions == sorted(versions)
            told, top = chunks[0].prompt, request.sampling.prompt_logprobs
            assert all(chunk.prompt is None for chunk in chunks[1:])
            assert (told is not None) == (top is not None and len(ids) > 0)
            if told is not None:
                np.testing.assert_array_equal(told.ranks, request.prompt[1:])
                assert set(told.logprobs) <= {versions[0]}, "log-probs of several versions"
                assert told.top_ids.shape == (len(request.prompt) - 1, top)
                np.testing.assert_array_equal(
                    told.top_ids, np.stack([request.prompt[:-1]] * top, -1)
                )
                assert chunks[0].cached_tokens == 0
            if self.cfg.routes and chunks[-1].finish is not Finish.ABORT:
                routes = np.concatenate([chunk.routes for chunk in chunks])[:, 0, 0]
                np.testing.assert_array_equal(routes, [*request.prompt, *ids][:-1])

    def idle(self) -> None:
        """Nothing runs: every page is free or in the tree, and nobody holds any."""
        self.scheduler.audit()
        for memory in self.scheduler.places.all:
            assert memory.tree.locked == 0
            assert memory.pool.free + memory.tree.evictable == memory.pool.total
            memory.tree.evict(len(memory.tree))
            assert memory.pool.free == memory.pool.total, "leaves alone empty the tree"


def alone(request: Request, context: int) -> list[int]:
    """What a request is given, whatever runs beside it."""
    sampling, start = request.sampling, len(request.prompt)
    room = context - start
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    ids = []
    for position in range(start, start + limit):
        ids.append(drawn(sampling.seed or 0, sampling.choice, position))
        if ids[-1] in STOPS and not sampling.ignore_eos:
            break
    return ids


def prompts(rng: random.Random) -> np.ndarray:
    """One of a few beginnings, cut anywhere, and an end of its own."""
    beginning = np.random.default_rng(rng.randrange(3)).integers(2, VOCAB, 20)
    own = [rng.randrange(2, VOCAB) for _ in range(rng.choice([0, 1, 3]))]
    return np.array([*beginning[: rng.randrange(1, 21)], *own], np.int32)


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
