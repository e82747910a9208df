"""A discrete-event simulation of instances behind a router.

Sessions flow in; what every call waited, hit and moved flows out. The router is the `Fleet` that
routes live calls, told of the same events; what it does not know here either is how long a
prefill will really take. Invariant: the same arguments give the same numbers, and every call of
the trace ends once.

Every block that an instance computes is written through to the shared store, if there is one,
unless what waits to be written would take longer than `patience`. Transfers into one instance,
and out of one, go one after the other.
"""

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from forge_jax.config import UserError, check
from forge_jax.rollout.router.cache import Cache
from forge_jax.rollout.router.cost import Call, Link, Plan, Policy, Prefill, Weights
from forge_jax.rollout.router.fleet import STORE, Fleet, Priors
from forge_jax.rollout.router.index import Block, PrefixIndex
from forge_jax.rollout.router.instance import Instance, InstanceConfig, Job, path
from forge_jax.rollout.router.traces import Session


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Ways to get pages without computing them."""

    store: bool = True  # there is a shared store
    peers: bool = True  # instances fetch from each other
    token_bytes: int = 131_072  # keys and values of a token, all layers
    store_latency: float = 0.005  # seconds of a transfer, however short
    store_bandwidth: float = 5e9  # bytes a second, into an instance or out of it
    peer_latency: float = 0.002
    peer_bandwidth: float = 10e9
    capacity: int = 50_000_000  # tokens that the store keeps
    patience: float = 1.0  # seconds of writes that may wait; beyond, blocks are not written

    def __post_init__(self) -> None:
        for name in ("token_bytes", "capacity"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("store_bandwidth", "peer_bandwidth"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")
        for name in ("store_latency", "peer_latency", "patience"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")

    def link(self, source: str) -> Link:
        """What a transfer really takes."""
        if source == STORE:
            return Link(latency=self.store_latency, token=self.token_bytes / self.store_bandwidth)
        return Link(latency=self.peer_latency, token=self.token_bytes / self.peer_bandwidth)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What became of one call."""

    arrived: float
    instance: int
    tokens: int  # of its prompt
    cached: int  # of those, not computed
    moved: int  # that were fetched for it
    ttft: float  # seconds from its arrival to its first token
    predicted: float  # ... that the plan foresaw
    ended: float


@dataclass(kw_only=True, eq=False)
class _Open:
    """A call that has not ended."""

    session: Session
    turn: int
    plan: Plan
    arrived: float
    ttft: float = 0.0


def simulate(
    sessions: Sequence[Session],
    instances: int,
    policy: Policy,
    weights: Weights,
    instance: InstanceConfig,
    tiers: TierConfig,
    seed: int = 0,
) -> list[Served]:
    """Plays a trace; gives its calls in the order of their ends.

    Raises UserError where a call of the trace is longer than an instance's memory.
    """
    longest = max(sum(b.tokens for t in s.turns for b in (*t.added, *t.reply)) for s in sessions)
    if longest > instance.memory:
        raise UserError(f"memory={instance.memory} is below a call's {longest}")
    return _Simulation(instances, policy, weights, instance, tiers, seed).play(sessions)


class _Simulation:
    def __init__(
        self,
        instances: int,
        policy: Policy,
        weights: Weights,
        instance: InstanceConfig,
        tiers: TierConfig,
        seed: int,
    ):
        self._tiers = tiers
        self._noise = random.Random(seed)
        self._spread = instance.noise
        self._fleet = Fleet(policy, weights, _priors(instance, tiers))
        self._index = PrefixIndex()  # who holds what, as it is
        self._instances: dict[str, Instance] = {}
        for number in range(instances):
            name = str(number)
            self._fleet.add(name, instance.slots)
            self._instances[name] = Instance(instance, self._cache(name, instance.memory))
        self._store = self._cache(STORE, tiers.capacity) if tiers.store else None
        self._lanes = dict.fromkeys(itertools.product(("in", "out", "store"), self._instances), 0.0)
        self._events: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()
        self._ties = itertools.count()
        self._open: dict[int, _Open] = {}
        self._histories: dict[str, tuple[Block, ...]] = {}
        self._served: list[Served] = []
        self._now = 0.0

    def play(self, sessions: Sequence[Session]) -> list[Served]:
        for session in sessions:
            self._at(session.start, partial(self._arrive, session, 0))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()  # type: ignore[operator]
        assert not self._open, "a call was never served"
        return self._served

    def _cache(self, name: str, capacity: int) -> Cache:
        index = self._index
        return Cache(capacity, partial(index.add, name), partial(index.discard, name))

    def _at(self, moment: float, act: object) -> None:
        heapq.heappush(self._events, (moment, next(self._ties), act))

    def _arrive(self, session: Session, turn: int) -> None:
        """A call is routed, and its pages are asked for."""
        now, spoken = self._now, session.turns[turn]
        blocks = (*self._histories.get(session.name, ()), *spoken.added)
        call = Call(
            number=next(self._numbers),
            session=session.name,
            tokens=sum(block.tokens for block in blocks),
        )
        plan = self._fleet.decide(call, blocks, self._index.prefixes(blocks), now)
        self._fleet.sent(call, blocks, plan, now)
        job = Job(
            number=call.number,
            blocks=blocks,
            tokens=call.tokens,
            reply=spoken.reply,
            replied=sum(block.tokens for block in spoken.reply),
            noise=self._noise.lognormvariate(0.0, self._spread),
            sent=now,
            ready=plan.source is None,
        )
        self._open[call.number] = _Open(session=session, turn=turn, plan=plan, arrived=now)
        self._instances[plan.instance].submit(job)
        if plan.source is not None:
            self._fetch(plan, job)
        self._touch(plan.instance)

    def _fetch(self, plan: Plan, job: Job) -> None:
        assert plan.source is not None
        lanes = [("in", plan.instance)]
        if plan.source != STORE:
            lanes.append(("out", plan.source))
        seconds = self._tiers.link(plan.source).seconds(plan.fetched)
        done = max(self._now, *(self._lanes[lane] for lane in lanes)) + seconds
        for lane in lanes:
            self._lanes[lane] = done
        self._at(done, partial(self._fetched, plan, job, seconds))

    def _fetched(self, plan: Plan, job: Job, seconds: float) -> None:
        """Pages arrive, as many of them as their source still has."""
        assert plan.source is not None
        source = self._cache_of(plan.source)
        job.fetched = source.prefix(job.blocks)
        source.insert(path(job.blocks, job.fetched))  # of use, so now they are its newest
        job.ready = True
        self._fleet.fetched(plan, self._now, plan.fetched, seconds)
        self._touch(plan.instance)

    def _tick(self, name: str, stamp: int) -> None:
        """What an instance foresaw has come, unless something else came first."""
        if self._instances[name].stamp == stamp:
            self._touch(name)

    def _touch(self, name: str) -> None:
        """Brings an instance up to now, and asks it what comes next."""
        self._advance(name)
        instance = self._instances[name]
        instance.begin()
        foreseen = instance.next()
        if foreseen < math.inf:
            self._at(foreseen, partial(self._tick, name, instance.stamp))

    def _advance(self, name: str) -> None:
        first, ended = self._instances[name].advance(self._now)
        if first is not None:
            self._answer(name, first)
        for job in ended:
            self._end(name, job)

    def _answer(self, name: str, job: Job) -> None:
        """The first token comes with the first decode step after the prefill."""
        call, now = self._open[job.number], self._now + self._instances[name].step_seconds
        call.ttft = now - call.arrived
        self._fleet.first(job.number, self._now, job.began - job.sent, job.cached)
        self._write(name, job.blocks)

    def _end(self, name: str, job: Job) -> None:
        call = self._open.pop(job.number)
        session, turn = call.session, call.turn
        self._fleet.ended(job.number, self._now)
        self._served.append(
            Served(
                arrived=call.arrived,
                instance=int(name),
                tokens=job.tokens,
                cached=job.cached,
                moved=call.plan.fetched,
                ttft=call.ttft,
                predicted=call.plan.seconds,
                ended=self._now,
            )
        )
        history = (*job.blocks, *job.reply)
        self._write(name, history)
        if turn + 1 < len(session.turns):
            self._histories[session.name] = history
            then = self._now + session.turns[turn + 1].pause
            self._at(then, partial(self._arrive, session, turn + 1))

    def _write(self, name: str, blocks: tuple[Block, ...]) -> None:
        """Writes what the store does not have, in the background."""
        if self._store is None:
            return
        tokens = sum(b.tokens for b in blocks) - self._store.prefix(blocks)
        lane = ("store", name)
        begins = max(self._now, self._lanes[lane])
        if tokens and begins - self._now <= self._tiers.patience:
            self._lanes[lane] = begins + self._tiers.link(STORE).seconds(tokens)
            self._at(self._lanes[lane], partial(self._store.insert, blocks))

    def _cache_of(self, source: str) -> Cache:
        if source != STORE:
            return self._instances[source].cache
        assert self._store is not None
        return self._store


def _priors(instance: InstanceConfig, tiers: TierConfig) -> Priors:
    """What the router believes at first: half as fast as it is, and no quadratic part."""
    return Priors(
        prefill=Prefill(base=instance.base, token=2 * instance.token),
        store=tiers.link(STORE) if tiers.store else None,
        peer=tiers.link("") if tiers.peers else None,
    )
