"""The host side of an engine on a device that checks it, and what a request gets alone."""

import random
from collections import defaultdict
from typing import Any

import numpy as np
from checking_device import VOCAB, FakeDevice, drawn

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Limits, job_of
from forge_jax.rollout.plans import Plan, Results
from forge_jax.rollout.scheduler import Scheduler
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
