"""The tiers below an engine's pool, between its event loop and its device thread.

Nodes that the engine's memory has noted flow down; pages of a prompt flow up, into the prefix
tree. Invariant: pages are copied out of the pool on the device thread, before a call that is
dispatched later can write over them, and enter the tree under the weights that made them only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout.keys import block_keys, root_key
from forge_jax.rollout.moving import MOVED
from forge_jax.rollout.places import Places
from forge_jax.rollout.runner import Runner
from forge_jax.rollout.tiers.cost import FetchCost
from forge_jax.rollout.tiers.host import HostPages, pinned
from forge_jax.rollout.tiers.location import open_store
from forge_jax.rollout.tiers.outlet import Outlet
from forge_jax.rollout.tiers.payload import Page, PageFormat
from forge_jax.rollout.tiers.store import PageStore, Patience
from forge_jax.rollout.tiers.tiers import Staged, Tiers
from forge_jax.types import route_dtype

FORMAT = 2  # of pages; to be raised when what they hold changes
OnDevice = Callable[..., Awaitable[Any]]
Ingest = Callable[[int, list[Page]], Awaitable[None]]


class Lower:
    """Host memory and a store below one engine."""

    def __init__(self, cfg: ModelConfig, rollout: RolloutConfig, runner: Runner, places: Places):
        """Opens the store, which may take a while; `runner` must have started. Raises UserError
        where there can be no store."""
        self._cfg, self._rollout, self._runner, self._places = cfg, rollout, runner, places
        self._fetching: dict[bytes, asyncio.Future[None]] = {}  # by the first page of each
        patience = Patience()
        self._cost = FetchCost(0.0, float("inf"))
        host = store = None
        if rollout.host_pages:
            host = HostPages(rollout.host_pages, pinned(runner.page_sharding))
        if rollout.store is not None:
            opened, self._cost.latency = open_store(rollout.store)
            store = PageStore(opened, self._format(), self._cost, patience)
        self._tiers = Tiers(host, store, patience)
        self.renew()

    def renew(self) -> None:
        """Goes on with the weights that the runner has now."""
        outlet = Outlet(self._root(), self._rollout.routes)
        self._places.lead_to(outlet)
        self._tiers.renew(outlet.root)

    def measured(self, seconds_a_token: float) -> None:
        """What computing a token takes, which fetching it has to beat; until it is told every
        fetch pays."""
        self._cost.prefill = seconds_a_token

    def stored(self, ids: np.ndarray) -> int:
        """How many of the leading full pages of `ids` are known to be in the store."""
        outlet = self._places.outlet
        assert outlet is not None, "renew() gives the places one"
        return self._tiers.stored(outlet.root, block_keys(outlet.root, ids, self._rollout.page))

    def fetch_seconds(self, tokens: int) -> float:
        """What fetching so many tokens from the store takes, as measured so far."""
        return self._cost.seconds(tokens)

    def stats(self) -> Mapping[str, float]:
        return self._tiers.stats()

    async def send(self, on_device: OnDevice) -> None:
        """Copies what the places have noted; to be awaited before the next call is dispatched."""
        outlet = self._places.outlet
        assert outlet is not None, "renew() gives the places one"
        leaving = outlet.take(self._tiers.lacks)
        if not leaving:
            return
        parts = await on_device(self._runner.stage, [node.page for node, _ in leaving])
        for index, part in enumerate(parts):
            some = leaving[index * MOVED : (index + 1) * MOVED]
            self._tiers.keep(
                Staged(
                    root=outlet.root,
                    keys=tuple(node.name for node, _ in some),
                    pages=part,
                    routes=tuple(node.routes for node, _ in some),
                    hot=tuple(hot for _, hot in some),
                )
            )

    async def bring(self, ids: np.ndarray, ingest: Ingest) -> None:
        """Has `ingest` put the full pages of `ids` in the tree that the tiers have and it lacks;
        it is given the number of the first of them in the sequence."""
        outlet, page = self._places.outlet, self._rollout.page
        assert outlet is not None, "renew() gives the places one"
        below = block_keys(outlet.root, ids, page)
        have = self._in_tree(ids)
        pages = self._tiers.at_hand(outlet.root, below[have:])
        if pages:
            await ingest(have, pages)
            have = self._in_tree(ids)
        if have == len(below) or not self._tiers.pays((len(below) - have) * page):
            return
        first = below[have]
        if first in self._fetching:  # by a mate
            await asyncio.wait([self._fetching[first]])
            return
        fetched = asyncio.wrap_future(self._tiers.fetch(outlet.root, below[have:], page))
        done = self._fetching[first] = asyncio.get_running_loop().create_future()
        try:
            pages = await fetched
            if pages:
                await ingest(have, pages)
        finally:
            del self._fetching[first]
            done.set_result(None)

    def _in_tree(self, ids: np.ndarray) -> int:
        keys = block_keys(self._places.root, ids, self._rollout.page)
        return len(self._places.best(keys).tree.match(keys))

    def _format(self) -> PageFormat:
        shape, dtype = self._runner.page
        cfg, rollout = self._cfg, self._rollout
        plain = PageFormat(
            shape=shape,
            dtype=dtype.name,
            tails=(rollout.modules, cfg.embed) if rollout.modules else None,
        )
        if not rollout.routes:
            return plain
        return replace(
            plain,
            routes=(rollout.page, cfg.layers, cfg.experts_per_token),
            routes_dtype=route_dtype(cfg.experts).name,
        )

    def _root(self) -> bytes:
        """The digest of all that pages depend on but their tokens."""
        runner, rollout = self._runner, self._rollout
        shape, dtype = runner.page
        parts: dict[str, str | int] = {
            "format": FORMAT,
            "model": repr(self._cfg),
            "weights": runner.digest.hex() or f"version {runner.version} swap {runner.swaps}",
            "dtype": dtype.name,
            "page": repr(shape),
            "routes": rollout.routes,
        }
        if rollout.deterministic:  # then bits count, and these depend on how they are computed
            where = runner.page_sharding
            devices: list[Any] = list(where.device_set)
            kinds = sorted(device.device_kind for device in devices)
            sizes = (rollout.chunk, rollout.context, rollout.attention, rollout.dealt)
            parts["numerics"] = f"{jax.__version__} {kinds} {where} {sizes}"
        return root_key(parts)
