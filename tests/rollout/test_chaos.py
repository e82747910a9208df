"""Laws of scheduler and pages together, whatever comes in which order."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fake_device import VOCAB, FakeDevice, drawn, route

from forge_jax.config import UPDATES, RolloutConfig
from forge_jax.rollout.jobs import Limits, job_of
from forge_jax.rollout.plans import Results
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.types import Chunk, Finish, Request, Sampling

TINY = RolloutConfig(slots=8, context=32, page=4, pages=26, chunk=16, decode_steps=3, routes=True)
TIGHT = replace(TINY, pages=TINY.sequence_pages + 2)  # one whole sequence, a page, and scratch
LONE = replace(TINY, slots=5, decode_steps=1, pages=20)  # bundles of one
PATIENCE = 3000  # rounds after which nothing will come any more


@dataclass
class Bench:
    """A scheduler on a fake device, and all that its callers got."""

    rollout: RolloutConfig
    scheduler: Scheduler = field(init=False)
    device: FakeDevice = field(init=False)
    asked: dict[int, Request] = field(default_factory=dict)
    got: dict[int, list[Chunk]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    unread: Results | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.rollout, b"0")
        self.device = FakeDevice(self.rollout, mixed=self.rollout.update == "keep")

    def submit(self, prompt: np.ndarray, stop_ids: tuple[int, ...] = (), **sampling: int) -> int:
        number = len(self.asked)
        request = Request(prompt=prompt, sampling=Sampling(stop_ids=stop_ids, **sampling))
        limits = Limits(context=self.rollout.context, vocab=VOCAB, stop_ids=())
        seed = (0, sampling.get("seed", 0))
        self.scheduler.submit(job_of(request, limits, number, seed, None, 0.0))
        self.asked[number], self.got[number] = request, []
        return number

    def leave(self, number: int) -> None:
        self.left.add(number)
        self.scheduler.abandon(number)

    def take(self, chunks: list[tuple[int, Chunk]]) -> None:
        for number, chunk in chunks:
            assert number not in self.left, "a chunk for nobody"
            before = self.got[number]
            assert not before or before[-1].finish is None, "a chunk after the last one"
            before.append(chunk)

    def round(self, hold: bool = False) -> bool:
        """Plans and runs a round; reads one, the one before where the new one is held."""
        scheduler, ready = self.scheduler, self.unread
        tree = {**scheduler.memory.tree._nodes}
        held = {node.page: self.device.tokens[node.page].copy() for node in tree.values()}
        running = [number for number in self.got if number in scheduler._stays]
        plan = scheduler.plan()
        scheduler.audit()
        assert not running or min(running) in scheduler._stays, "the oldest was put back"
        new = None if plan is None else self.device.run(plan)
        for key, node in scheduler.memory.tree._nodes.items():
            if tree.get(key) is node:
                np.testing.assert_array_equal(self.device.tokens[node.page], held[node.page])
        if ready is None and not hold:
            ready, new = new, None
        self.unread = new
        if ready is not None:
            self.take(scheduler.apply(ready))
            scheduler.audit()
        return plan is not None or ready is not None

    def update(self) -> None:
        """New weights, as the engine goes about them."""
        scheduler, mode = self.scheduler, self.rollout.update
        if mode == "wait":
            scheduler.admitting = False
            self.finish(lambda: not scheduler.running)
            scheduler.admitting = True
        self.device.version += 1
        if mode == "recompute":
            scheduler.retract()
        elif mode == "abort":
            self.take(scheduler.abort())
        scheduler.renew(b"%d" % self.device.version)

    def finish(self, done=None) -> None:
        """Rounds until nobody waits or runs, or `done` says so."""
        scheduler = self.scheduler
        for _ in range(PATIENCE):
            if done() if done else not scheduler.running + scheduler.waiting:
                return
            assert self.round(), "requests wait and nothing is planned"
        raise AssertionError("a deadlock")

    def settle(self) -> None:
        """Ends everything, and holds it against what each request gets alone."""
        self.finish()
        while self.unread is not None:
            self.round()
        memory = self.scheduler.memory
        assert memory.tree.locked == 0
        assert memory.pool.free + memory.tree.evictable == memory.pool.total
        counts = self.scheduler.counts
        assert counts["submitted"] == len(self.asked) == sum(counts[f] for f in Finish)
        for number, chunks in self.got.items():
            if number not in self.left:
                self._compare(self.asked[number], chunks)

    def _compare(self, request: Request, chunks: list[Chunk]) -> None:
        want, sampling = [], request.sampling
        room = self.rollout.context - len(request.prompt)
        for at in range(min(sampling.max_tokens or room, room)):
            token = drawn(sampling.seed or 0, sampling.choice, len(request.prompt) + at)
            want.append(token)
            if token in sampling.stop_ids:
                break
        got = [token for chunk in chunks for token in chunk.ids.tolist()]
        finish = chunks[-1].finish
        assert [chunk.finish is None for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
        versions = [version for chunk in chunks for version in chunk.versions.tolist()]
        assert versions == sorted(versions)
        if finish is Finish.ABORT:
            assert got == want[: len(got)]
            return
        assert got == want
        assert finish is (Finish.STOP if want[-1] in sampling.stop_ids else Finish.LENGTH)
        fed = np.concatenate([request.prompt, want])[:-1]
        if self.rollout.routes:
            routes = np.concatenate([chunk.routes for chunk in chunks])[:, 0, 0]
            np.testing.assert_array_equal(routes, route(fed, np.arange(len(fed))))


def prompt_of(rng: random.Random, bench: Bench, families: list[list[int]]) -> np.ndarray:
    """A prompt that begins as others do, or goes on from what one of them was given."""
    most, number = bench.rollout.context - 1, rng.randrange(-2, max(1, len(bench.got)))
    tokens = (family := rng.choice(families))[: rng.randrange(len(family) + 1)]
    if number >= 0 and bench.got.get(number):
        given = np.concatenate([chunk.ids for chunk in bench.got[number]])
        tokens = [*bench.asked[number].prompt.tolist(), *given.tolist()][: most - 1]
    tokens += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
    return np.array(tokens[:most], np.int32)


def storm(bench: Bench, seed: int, steps: int = 120) -> None:
    rng = random.Random(seed)
    families = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    scheduler, paused = bench.scheduler, 0
    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 6])):
            stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 3])))
            budget = {"max_tokens": rng.randrange(1, 20)} if rng.random() < 0.7 else {}
            prompt = prompt_of(rng, bench, families)
            bench.submit(prompt, stops, seed=rng.randrange(9), choice=rng.randrange(3), **budget)
        live = [n for n, c in bench.got.items() if n not in bench.left and not (c and c[-1].finish)]
        if live and rng.random() < 0.15:
            bench.leave(rng.choice(live))
        if not scheduler.paused and rng.random() < 0.04:
            bench.update()
        if rng.random() < 0.03:
            paused = rng.randrange(1, 4)
            if rng.random() < 0.5:
                scheduler.retract()
        scheduler.paused = paused > 0
        paused -= scheduler.paused
        bench.round(hold=rng.random() < 0.7)
    scheduler.paused = False


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("rollout", [TINY, TIGHT, LONE], ids=["tiny", "tight", "lone"])
def test_every_request_gets_what_it_gets_alone(rollout: RolloutConfig, update: str) -> None:
    """Requests that come, leave, fork, lack pages and live through updates and pauses; the device
    holds each table against the sequence of its own, and every page against who writes it."""
    seen = {"preemptions": 0, "cached_tokens": 0, Finish.ABORT: 0, Finish.STOP: 0}
    for seed in range(6):
        bench = Bench(replace(rollout, update=update))
        storm(bench, seed)
        bench.settle()
        for name in seen:
            seen[name] += bench.scheduler.counts[name]
    assert all(seen.values()), f"nothing of the kind has happened: {seen}"


@pytest.mark.parametrize("change", [{"prefix_cache": False}, {"deterministic": True}])
def test_engines_without_a_cache_or_with_one_shape_obey_the_same_laws(change: dict) -> None:
    for seed in range(4):
        bench = Bench(replace(TINY, **change))
        storm(bench, seed)
        bench.settle()
        assert bool(bench.scheduler.counts["cached_tokens"]) == ("deterministic" in change)


def test_a_pool_of_one_sequence_and_a_page_serves_64_requests() -> None:
    bench = Bench(TIGHT)
    for index in range(64):
        bench.submit(np.full(1 + index % 31, index % VOCAB, np.int32), seed=index)
    bench.settle()
    assert bench.scheduler.counts[Finish.LENGTH] == 64
    assert bench.scheduler.counts["preemptions"]


def group(bench: Bench, shared: int, size: int) -> list[int]:
    beginning = np.arange(shared, dtype=np.int32)
    return [
        bench.submit(np.append(beginning, [40 + i, 30, 20]).astype(np.int32), seed=i, max_tokens=4)
        for i in range(size)
    ]


def test_a_group_computes_its_beginning_once_and_in_one_round() -> None:
    bench = Bench(replace(TINY, pages=None))
    numbers = group(bench, shared=12, size=8)
    bench.round()
    assert bench.scheduler.counts["prefill_tokens"] == 14 + 7 * 2
    assert all(bench.got[number] for number in numbers), "all are sampled in the first round"
    bench.settle()
    cached = [bench.got[number][0].cached_tokens for number in numbers]
    assert cached == [0] + [12] * 7


def test_rows_of_a_group_read_their_beginning_together() -> None:
    bench = Bench(replace(TINY, slots=32, pages=None))
    group(bench, shared=12, size=8)
    plan = bench.scheduler.plan()
    assert plan is not None
    assert plan.decode is not None
    shape = plan.decode.shape
    assert shape.rows < bench.rollout.slots
    assert shape.shared >= 3
    assert shape.own < bench.rollout.sequence_pages
    bench.take(bench.scheduler.apply(bench.device.run(plan)))
    bench.settle()


@pytest.mark.parametrize("update", UPDATES)
def test_nothing_of_old_weights_is_read_after_an_update(update: str) -> None:
    bench = Bench(replace(TINY, pages=None, update=update))
    prompt = np.arange(20, dtype=np.int32)
    for number in range(2):
        bench.submit(prompt, seed=number, max_tokens=5)
        bench.finish()
    assert [bench.got[n][0].cached_tokens for n in range(2)] == [0, 16]
    bench.submit(prompt, seed=2)
    bench.round()
    bench.update()
    for number in (3, 4):
        bench.submit(prompt, seed=number, max_tokens=5)
        bench.finish()
    assert [bench.got[n][0].cached_tokens for n in (3, 4)][1] == 16
    if update != "recompute":  # there the running one computes it for the first that comes
        assert bench.got[3][0].cached_tokens == 0
    bench.settle()
    kept = {version for chunk in bench.got[2] for version in chunk.versions.tolist()}
    assert kept == {"keep": {0, 1}, "recompute": {0, 1}, "wait": {0}, "abort": {0}}[update]


def test_an_aborted_prefill_is_taken_over_by_who_waited_for_it() -> None:
    bench = Bench(replace(TINY, pages=None, chunk=4))
    first, second = (bench.submit(np.arange(30, dtype=np.int32), seed=n) for n in range(2))
    bench.submit(np.array([1], np.int32), max_tokens=25)
    while bench.scheduler.running < 2:
        bench.round()
    bench.leave(first)
    bench.settle()
    assert bench.got[second][-1].finish is Finish.LENGTH


def test_a_page_begun_with_other_weights_is_not_shared() -> None:
    bench = Bench(replace(TINY, pages=None, update="keep"))
    first = bench.submit(np.array([3], np.int32), max_tokens=12)
    bench.round()  # three of the first page's four tokens
    bench.update()
    bench.finish()
    tokens = np.concatenate([[3], *(chunk.ids for chunk in bench.got[first])])
    second = bench.submit(tokens.astype(np.int32), max_tokens=2)
    bench.settle()
    assert bench.got[second][0].cached_tokens == 0
