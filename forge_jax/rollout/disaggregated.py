"""Prefill and decode on devices of their own, as one engine.

A request goes to an engine that decodes; what that one has not cached of the prompt, in whole
pages, is computed by an engine that prefills and moved over. So a long prompt never stands
between two tokens of other requests. Invariant: pages enter an engine only under the weights that
made them; a request whose pages cannot move is computed where it is decoded, to the same tokens.
"""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from forge_jax.config import RolloutConfig, UserError
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.observe.totals import together
from forge_jax.types import Chunk, Finish, Request, Sampling


def decoding(rollout: RolloutConfig) -> RolloutConfig:
    """Of an engine that decodes: a prefill call there has the rest of a prompt, a page at most,
    and every stream waits for it."""
    return dataclasses.replace(rollout, chunk=rollout.page)


class DisaggregatedEngine:
    """Engines of one model, each with a mesh and a device thread; implements `types.Engine`."""

    def __init__(
        self,
        prefill: Sequence[RolloutEngine],
        decode: Sequence[RolloutEngine],
        rollout: RolloutConfig,
    ):
        """`rollout` is that of all engines, but for slots, pages, chunks and steps of a call; see
        `decoding`. Raises UserError without a prefix cache, through which pages move."""
        if not rollout.prefix_cache:
            raise UserError("prefix_cache=False: prefill and decode apart hand over its pages")
        self._prefill, self._decode = tuple(prefill), tuple(decode)
        self._page = rollout.page
        self._changing = asyncio.Lock()
        self._open = asyncio.Event()  # no weights are being swapped
        self._open.set()
        # One move of a prompt to an engine at a time: mates of a group wait for the first.
        self._moves: WeakValueDictionary[tuple[int, bytes], asyncio.Lock] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0  # that pages were on their way, added up

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        return self._decode[0].version

    def stats(self) -> Mapping[str, float]:
        """Totals of the decoding engines, those of the prefilling ones behind "prefill_engine_",
        and what was moved between them."""
        decode, prefill = (
            together([one.stats() for one in engines]) for engines in (self._decode, self._prefill)
        )
        return {
            **decode,
            **{f"prefill_engine_{name}": x for name, x in prefill.items()},
            **{f"moved_{name}": self._counts[name] for name in ("pages", "bytes", "refused")},
            "moved_seconds": self._seconds,
        }

    async def warm_up(self) -> None:
        """Compiles every shape the engines can meet; call it before serving."""
        for engine in self._engines:  # one after the other: each uses all cores
            await engine.warm_up()

    async def serve(self) -> None:
        """Runs until cancelled; a fault of one engine ends all and is raised here."""
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(engine.serve())

    async def swap(self, version: int, params: Any) -> None:
        """`RolloutEngine.swap` of all engines; requests that come meanwhile wait for it.

        Pages on their way are of weights that are gone, and are refused where they arrive.
        """
        async with self._changing:
            self._open.clear()
            try:
                async with asyncio.TaskGroup() as group:
                    for engine in self._engines:
                        group.create_task(engine.swap(version, params))
            finally:
                self._open.set()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as they are decoded; see `types.Engine`."""
        await self._open.wait()
        ids = np.asarray(request.prompt, np.int32)
        ids = ids[: max(ids.size - 1, 0) // self._page * self._page] if ids.ndim == 1 else ids[:0]
        engine = min(self._decode, key=lambda engine: self._load(engine, ids))
        lock = self._moves.setdefault((id(engine), ids.tobytes()), asyncio.Lock())
        async with lock:
            cached, waited = await self._bring(request, ids, engine)
        async with aclosing(engine.generate(request)) as chunks:
            first = True
            async for chunk in chunks:
                if first:  # pages that were only just computed are no hits of a cache
                    chunk = dataclasses.replace(
                        chunk,
                        cached_tokens=min(chunk.cached_tokens, cached),
                        queue_seconds=chunk.queue_seconds + waited,
                    )
                first = False
                yield chunk

    @property
    def _engines(self) -> tuple[RolloutEngine, ...]:
        return (*self._prefill, *self._decode)

    async def _bring(
        self, request: Request, ids: np.ndarray, engine: RolloutEngine
    ) -> tuple[int, float]:
        """Has `engine` cache the whole pages `ids` of a prompt.

        Returns the tokens of them that some engine had cached before, and the seconds that the
        request waited for an engine that prefills.
        """
        if request.sampling.prompt_logprobs is not None:  # read nowhere but where it is decoded
            return 0, 0.0
        have = len(engine.cached_prefix(ids))
        if have * self._page == len(ids):
            return len(ids), 0.0
        source = min(self._prefill, key=lambda source: self._load(source, ids))
        # It is the keys and values that are asked for; the one token is of no use.
        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        asked = dataclasses.replace(request, sampling=sampling)
        async with aclosing(source.generate(asked)) as chunks:
            first = await anext(chunks)
        if first.finish is Finish.ABORT:  # the weights changed, see `rollout.update`
            return have * self._page, first.queue_seconds
        have = len(engine.cached_prefix(ids))
        began = time.monotonic()
        parcel = await source.export_prefix(ids, have)
        try:
            await engine.ingest_prefix(ids, parcel)
        except ValueError:  # weights of another version are there by now
            self._counts["refused"] += 1
        else:
            self._counts["pages"] += parcel.pages
            self._counts["bytes"] += parcel.nbytes
            self._seconds += time.monotonic() - began
        return max(have * self._page, first.cached_tokens), first.queue_seconds

    def _load(self, engine: RolloutEngine, ids: np.ndarray) -> float:
        """Requests that an engine has, less the share of a prompt that it need not compute."""
        stats = engine.stats()
        hit = len(engine.cached_prefix(ids)) * self._page / max(len(ids), 1)
        return stats["requests_running"] + stats["requests_waiting"] - hit
