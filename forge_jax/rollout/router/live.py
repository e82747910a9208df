"""Several live engines behind one `types.Engine`: each request goes where it costs least.

Requests and weights flow in, chunks flow out. What an engine holds is asked of its own prefix
tree at each decision, so that evictions and weight updates are never missed; what it is busy
with follows from the requests that it was sent. Invariant: a request ends once. Where an engine
fails, requests that have no token yet begin again at another, and the others end with its error.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from forge_jax.config import RolloutConfig, check
from forge_jax.rollout.jobs import seed_of
from forge_jax.rollout.keys import block_keys, root_key
from forge_jax.rollout.moving import Parcel
from forge_jax.rollout.observe.totals import together
from forge_jax.rollout.router.baselines import POLICIES
from forge_jax.rollout.router.cost import Call, Link, Plan, Weights
from forge_jax.rollout.router.fleet import STORE, Fleet, Priors
from forge_jax.rollout.router.index import Block
from forge_jax.types import Chunk, Engine, Refused, Request

LOG = logging.getLogger(__name__)
PEER = Link(latency=2e-3, token=2e-6)  # before any transfer was seen
SHARED = Link(latency=5e-3, token=4e-6)  # of the store


class Member(Engine, Protocol):
    """What the router needs of an engine; `RolloutEngine` is one."""

    @property
    def version(self) -> int: ...

    def stats(self) -> Mapping[str, float]: ...

    def cached_prefix(self, ids: np.ndarray) -> list[np.ndarray | None]: ...

    def stored_prefix(self, ids: np.ndarray) -> int: ...

    def fetch_seconds(self, tokens: int) -> float: ...

    async def warm_up(self) -> None: ...

    async def serve(self) -> None: ...

    async def swap(self, version: int, params: Any) -> None: ...

    async def export_prefix(self, ids: np.ndarray, start: int) -> Parcel: ...

    async def ingest_prefix(self, ids: np.ndarray, parcel: Parcel) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How requests are spread over engines."""

    policy: str = "cost"
    weights: Weights = field(default_factory=Weights)
    peers: bool = True  # pages are fetched from one engine to another where that is quicker

    def __post_init__(self) -> None:
        known = ", ".join(POLICIES)
        check(self.policy in POLICIES, f"policy={self.policy!r} must be one of {known}")


class Router:
    """Implements `types.Engine` over engines that have the same weights and sizes."""

    def __init__(
        self,
        engines: Mapping[str, Member],
        rollout: RolloutConfig,
        cfg: RouterConfig,
        seed: int = 0,
    ) -> None:
        """`rollout` is that of each engine; `seed` draws the seeds of requests
        without one, which are those that one engine alone would draw."""
        check(len(engines) > 0, "engines={} must hold at least one")
        self._engines = dict(engines)
        self._page = rollout.page
        self._seed = seed
        self._requests = itertools.count()
        priors = Priors(
            store=None if rollout.store is None else SHARED, peer=PEER if cfg.peers else None
        )
        self._fleet = Fleet(POLICIES[cfg.policy], cfg.weights, priors)
        for name in self._engines:
            self._fleet.add(name, rollout.slots)
        self._numbers = itertools.count()
        self._fetched = 0  # tokens

    @property
    def version(self) -> int:
        """The oldest version that an engine samples from."""
        return min(self._engines[name].version for name in self._live())

    def stats(self) -> Mapping[str, float]:
        """Those of the engines together, see `observe.totals`, and the router's own."""
        return together([self._engines[name].stats() for name in self._live()]) | {
            "router_engines": len(self._fleet.names),
            "router_tokens_fetched": self._fetched,
        }

    async def warm_up(self) -> None:
        """Compiles every shape of every engine."""
        for engine in self._engines.values():  # what one has compiled the next one reuses
            await engine.warm_up()

    async def serve(self) -> None:
        """Runs every engine until cancelled. An engine that fails is taken out; the fault of the
        last one is raised."""
        async with asyncio.TaskGroup() as group:
            for name in self._engines:
                group.create_task(self._serve(name))

    async def swap(self, version: int, params: Any) -> None:
        """`RolloutEngine.swap` at every engine; each samples from the new weights as soon as it
        has them."""
        await asyncio.gather(*(self._engines[name].swap(version, params) for name in self._live()))
        self._fleet.renewed()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of the engine that it chose; see `types.Engine`."""
        request, began = self._seeded(request), False
        while True:
            number = next(self._numbers)
            plan = self._sent(number, request)
            try:
                async with aclosing(self._at(number, plan, request)) as chunks:
                    async for chunk in chunks:
                        began = True
                        yield chunk
                return
            except Refused as refusal:
                if refusal.status < 500:
                    raise
                self._out(plan.instance)
                if began or not self._fleet.names:
                    raise
            finally:
                self._fleet.ended(number, time.monotonic())

    def _seeded(self, request: Request) -> Request:
        """With a seed, so that no two requests share one whichever engines they go to."""
        number = next(self._requests)
        if request.sampling.seed is not None:
            return request
        high, low = seed_of(request.sampling, self._seed, number)
        return replace(request, sampling=replace(request.sampling, seed=high << 32 | low))

    def _sent(self, number: int, request: Request) -> Plan:
        """Decides, and enters the request where it goes; nothing comes between the two."""
        if not self._fleet.names:
            raise Refused(503, "every engine has failed")
        ids, now = request.prompt, time.monotonic()
        keys = block_keys(root_key({}), ids, self._page)
        blocks = [Block(key, self._page) for key in keys]
        session = keys[0].hex() if keys else ""  # a request names none: its beginning does
        call = Call(number=number, session=session, tokens=len(ids))
        # A prompt whose log-probs are asked for is computed whole.
        reads = ids if request.sampling.prompt_logprobs is None else ids[:0]
        held = {name: self._held(self._engines[name], reads) for name in self._fleet.names}
        # Pages of one store, so what one engine has put there the others find.
        held[STORE] = self._page * max(
            self._engines[name].stored_prefix(reads) for name in self._fleet.names
        )
        plan = self._fleet.decide(call, blocks, held, now)
        self._fleet.sent(call, blocks, plan, now)
        return plan

    async def _at(self, number: int, plan: Plan, request: Request) -> AsyncGenerator[Chunk, None]:
        sent, first = time.monotonic(), True
        engine = self._engines[plan.instance]
        comes = plan.source == STORE  # the engine fetches for itself while the request waits
        before = self._held(engine, request.prompt)
        if plan.source is not None and not comes:
            await self._fetch(plan, request.prompt)
        waited = time.monotonic() - sent
        # An engine's iterator can be closed: that is how a request is aborted.
        chunks = cast("AsyncGenerator[Chunk, None]", engine.generate(request))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if first:
                        queued = waited + chunk.queue_seconds
                        self._fleet.first(number, time.monotonic(), queued, chunk.cached_tokens)
                        first = False
                        if comes:
                            comes = False
                            self._came(plan, engine, chunk.cached_tokens - before)
                    yield chunk
        finally:
            if comes:
                self._came(plan, engine, 0)

    def _came(self, plan: Plan, engine: Member, tokens: int) -> None:
        """What was to come from the store is there, or will not come."""
        brought = max(tokens, 0)
        self._fetched += brought
        self._fleet.fetched(plan, time.monotonic(), brought, engine.fetch_seconds(brought))

    async def _fetch(self, plan: Plan, ids: np.ndarray) -> None:
        """Moves pages while the request waits. Where that fails, or the weights change meanwhile,
        the engine computes what it lacks."""
        assert plan.source is not None
        source, target = self._engines[plan.source], self._engines[plan.instance]
        began, brought = time.monotonic(), 0
        try:
            before = self._held(target, ids)
            parcel = await source.export_prefix(ids, before // self._page)
            if parcel.pages and parcel.version == target.version:
                brought = max(0, await target.ingest_prefix(ids, parcel) - before)
        except Exception:
            brought = 0
            LOG.exception("nothing came from engine %s to engine %s", plan.source, plan.instance)
        finally:
            now = time.monotonic()
            self._fetched += brought
            self._fleet.fetched(plan, now, brought, now - began)

    async def _serve(self, name: str) -> None:
        try:
            await self._engines[name].serve()
        except Exception:
            self._out(name)
            if not self._fleet.names:
                raise
            LOG.exception("engine %s has failed; %d remain", name, len(self._fleet.names))

    def _held(self, engine: Member, ids: np.ndarray) -> int:
        return len(engine.cached_prefix(ids)) * self._page

    def _out(self, name: str) -> None:
        if name in self._fleet.names:
            self._fleet.remove(name)

    def _live(self) -> tuple[str, ...]:
        """The engines that work; all of them where none does, for whoever still asks."""
        return self._fleet.names or tuple(self._engines)
