"""Pages in and out of one engine: to and from other engines, and the tiers below its pool.

Pages flow in under the tokens they are of, and enter the prefix tree as if a request had computed
them; those of the tree flow out. Invariant: what enters was made by the weights of the tree's
root, and a page is read or written in turn with the calls that are planned.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping

import jax
import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout.keys import block_keys
from forge_jax.rollout.lower import Lower, OnDevice
from forge_jax.rollout.moving import Parcel
from forge_jax.rollout.packets import SCRATCH
from forge_jax.rollout.places import Places
from forge_jax.rollout.runner import Runner
from forge_jax.rollout.tiers.payload import Page, parts_of


class Passage:
    """Belongs to the engine whose parts it is given."""

    def __init__(
        self,
        cfg: ModelConfig,
        rollout: RolloutConfig,
        runner: Runner,
        places: Places,
        turn: asyncio.Lock,
        on_device: OnDevice,
    ):
        """Whoever has `turn` alone plans calls or touches pages; `on_device` runs work on the
        device thread."""
        self._cfg, self._rollout, self._runner, self._places = cfg, rollout, runner, places
        self._turn, self._on_device = turn, on_device
        self._lower: Lower | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Opens the tiers that are configured, once; the runner must have started."""
        async with self._opening:
            if self._lower is None and self._rollout.tiered:
                args = (self._cfg, self._rollout, self._runner, self._places)
                self._lower = await asyncio.to_thread(Lower, *args)

    async def measure(self) -> None:
        """Finds out from when on fetching beats computing; all slots must be idle."""
        if self._lower is not None:
            self._lower.measured(await self._on_device(self._runner.seconds_a_token))

    def renew(self) -> None:
        """The runner and the places have gone on to other weights."""
        if self._lower is not None:
            self._lower.renew()

    def stats(self) -> Mapping[str, float]:
        """Counters of the tiers below, if there are any."""
        return {} if self._lower is None else self._lower.stats()

    def cached(self, ids: np.ndarray) -> list[np.ndarray | None]:
        """The routes, where they are recorded, of each leading page of `ids` in the tree of the
        place that has most of them."""
        keys = self._keys(ids)
        return [node.routes for node in self._places.best(keys).tree.match(keys)]

    def stored(self, ids: np.ndarray) -> int:
        """How many of the leading pages of `ids` are known to be in the store below."""
        return 0 if self._lower is None else self._lower.stored(ids)

    def fetch_seconds(self, tokens: int) -> float:
        """What fetching so many tokens from the store takes; 0 where there is none."""
        return 0.0 if self._lower is None else self._lower.fetch_seconds(tokens)

    async def export(self, ids: np.ndarray, start: int = 0) -> Parcel:
        """The pages of the first tokens `ids` that are in the tree of the place that has most of
        them, from number `start` on, as copies on the device that are complete."""
        keys = self._keys(ids)
        async with self._turn:
            nodes = self._places.best(keys).tree.match(keys)
            if self._rollout.routes:  # a page whose routes were not read yet would leave a gap
                nodes = list(itertools.takewhile(lambda node: node.routes is not None, nodes))
            nodes, version = nodes[start:], self._runner.version
            # Whoever writes over a page has its turn after this one.
            parts = await self._on_device(self._runner.stage, [node.page for node in nodes])
        await asyncio.to_thread(jax.block_until_ready, parts)
        routes = tuple(node.routes for node in nodes)
        return Parcel(version=version, start=start, routes=routes, parts=tuple(parts))

    async def land(self, parcel: Parcel) -> Parcel:
        """Brings a parcel of another engine to the devices of this one, in the background."""
        parts = await asyncio.to_thread(self._runner.landed, parcel.parts)
        return dataclasses.replace(parcel, parts=tuple(parts))

    async def ingest(self, ids: np.ndarray, parcel: Parcel) -> int:
        """Puts pages of the first tokens `ids` in the tree of the place that has most of them, of
        equals the emptiest, as far as there is room; returns how many tokens of `ids` it has then.
        To be called in turn.

        The parcel has landed, or is of the host.
        """
        keys, page, start = self._keys(ids), self._rollout.page, parcel.start
        keys = keys[: start + parcel.pages]
        memory = self._places.best(keys)
        held = memory.tree.match(keys)
        memory.tree.hold(held)
        pages: list[int] = []
        try:
            old = len(held)
            room = memory.available if old >= start else 0
            pages = memory.take(min(len(keys) - old, room))
            await self.send_down()
            if pages:
                targets = [SCRATCH] * parcel.pages
                targets[old - start : old - start + len(pages)] = pages
                await self._on_device(self._runner.ingest, targets, parcel.parts)
            for number, key in enumerate(keys[old : old + len(pages)], old):
                parent = held[-1] if held else None
                block = ids[number * page : (number + 1) * page]
                held.append(memory.insert(parent, key, pages.pop(0), block))
                held[-1].routes = parcel.routes[number - start]
        finally:
            memory.pool.give(pages)
            memory.tree.release(held)
        return len(held) * page

    async def bring(self, ids: np.ndarray) -> None:
        """Puts the full pages of `ids` that the tiers below have, and the tree has not, there."""
        assert self._lower is not None, "open() comes first"
        root = self._places.root

        async def enter(start: int, pages: list[Page]) -> None:
            parts = await asyncio.to_thread(parts_of, pages)
            routes = tuple(page.routes for page in pages)
            async with self._turn:
                if root == self._places.root:  # the weights are still the same
                    version = self._runner.version
                    parcel = Parcel(version=version, start=start, routes=routes, parts=parts)
                    await self.ingest(ids, parcel)

        await self._lower.bring(ids, enter)

    async def send_down(self) -> None:
        """Copies what has to leave the pool, before the next call can write over it."""
        if self._lower is not None:
            await self._lower.send(self._on_device)

    def _keys(self, ids: np.ndarray) -> list[bytes]:
        return block_keys(self._places.root, ids, self._rollout.page)
