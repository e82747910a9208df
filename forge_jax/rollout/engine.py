"""The rollout engine: requests in, chunks of sampled tokens out.

Host logic runs on the event loop, everything of the device on the one thread of the executor
it shares with the trainer. Invariant: every request ends exactly once, by a chunk with a
finish reason, by `Refused`, or by its caller closing the iterator; and no request reads keys
and values of other weights than those it began with, but where it runs on across an update.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np

from forge_jax.config import UPDATES, RolloutConfig, check
from forge_jax.models.config import ModelConfig
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.rollout import programs
from forge_jax.rollout.access import places_of
from forge_jax.rollout.changes import Changes
from forge_jax.rollout.fitting import check_model, over_places
from forge_jax.rollout.grammar import Grammars, Matcher
from forge_jax.rollout.jobs import Job, Limits, check_asked, job_of, seed_of
from forge_jax.rollout.keys import root_key
from forge_jax.rollout.moving import Parcel
from forge_jax.rollout.passage import Passage
from forge_jax.rollout.runner import Flight, Runner
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.rollout.stats import gauges
from forge_jax.rollout.stop import StopStrings, certain_run
from forge_jax.sharding import mesh_of
from forge_jax.types import Chunk, Refused, Request, Sampling

T = TypeVar("T")


class RolloutEngine:
    """Continuous batching over a pool of pages; implements `types.Engine`.

    `params` are stacked and are copied on the device thread before any job submitted to it
    later runs, so the caller may donate them from then on. `device` must have one thread.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Any,
        stop_ids: Iterable[int],
        rollout: RolloutConfig,
        tokenizer: Tokenizer,
        device: Executor,
        *,
        version: int = 0,
        seed: int = 0,
    ):
        """`version` is that of `params`; `seed` draws the seeds of requests without one.

        Raises UserError where these sizes do not suit the model, or the mesh of `params`.
        """
        check_model(rollout, cfg)
        rollout = over_places(rollout, places_of(mesh_of(params)))
        self._cfg, self._rollout = cfg, rollout
        self._limits = Limits(context=rollout.context, vocab=cfg.vocab, stop_ids=tuple(stop_ids))
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, cfg.vocab, self._limits.stop_ids)
        self._seed = seed
        self._numbers = itertools.count()
        self._epochs = itertools.count()  # of what the prefix tree may serve
        self._version = version
        self._scheduler = Scheduler(rollout, self._root(), cfg.vocab)
        self._callers: dict[int, asyncio.Queue[Chunk | Refused]] = {}
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # of the pool and the weights, from a plan to its dispatch
        self._changes = Changes(self._scheduler, self._turn, self._wake, self._send)
        self._serving = False
        self._closed: str | None = None  # why no request is taken
        self._failure: Exception | None = None
        self._device = device
        self._runner = Runner(cfg, rollout, version)
        self._started = device.submit(self._runner.start, params)
        self._passage = Passage(
            cfg, rollout, self._runner, self._scheduler.places, self._turn, self._on_device
        )

    @property
    def version(self) -> int:
        """Version of the weights that the next device call samples from."""
        return self._version

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals, for logs and metrics."""
        return {
            **gauges(self._scheduler),
            "swaps": self._runner.swaps,
            "weight_version": self.version,
            "programs_traced": programs.traces.total(),
            **self._passage.stats(),
            **self._scheduler.speculator.stats(),
        }

    async def warm_up(self) -> None:
        """Compiles every shape the engine can meet; call it before serving."""
        check(not self._serving, "warm_up() while serving")
        await self._ready()
        await self._on_device(self._runner.warm_up)
        if self._rollout.shaping:
            await asyncio.to_thread(self._grammars.open)
        await self._passage.measure()

    async def swap(self, version: int, params: Any) -> None:
        """Copies `params` and samples from the copy from the next device call on.

        What becomes of running requests is said by ``rollout.update``: "keep" goes on with the
        keys and values they have; "recompute" computes them again, with what was sampled so
        far; "wait" lets them end first, while new ones wait; "abort" ends them with
        Finish.ABORT. Whoever has not begun yet reads nothing of the old weights in any case.
        The caller may donate `params` once this returns; an update that has begun goes on if
        the caller is cancelled. Raises ValueError if the version is not newer, the parameters do
        not look like the first ones, or running requests are to end while the engine is paused.
        """
        await self._changes.lasting(self._swap(version, params))

    async def pause(self, mode: str = "keep") -> None:
        """Plans nothing more until `resume`; new requests wait. `mode` is as in `swap`: running
        requests stay as they are, are computed again later, end first, or are aborted."""
        check(mode in UPDATES, f"mode={mode!r} must be one of {', '.join(UPDATES)}")
        await self._changes.lasting(self._changes.pause(mode))

    def resume(self) -> None:
        """Goes on after a pause."""
        self._changes.resume()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as they are decoded; see `types.Engine`."""
        job = self._submit(request, await self._matcher(request.sampling))
        number, inbox = job.number, self._callers[job.number]
        bringing = asyncio.create_task(self._bring(job)) if job.held else None
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Refused):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            if bringing is not None:
                bringing.cancel()
            del self._callers[number]
            self._scheduler.abandon(number)
            self._changes.ended()

    def cached_prefix(self, ids: np.ndarray) -> list[np.ndarray | None]:
        """The routes, where they are recorded, of each leading page of `ids` that is cached."""
        return self._passage.cached(ids)

    def stored_prefix(self, ids: np.ndarray) -> int:
        """How many leading pages of `ids` this engine has written to or read from the store that
        it shares with others, under the weights that it has now."""
        return self._passage.stored(ids)

    def fetch_seconds(self, tokens: int) -> float:
        """What fetching so many tokens from that store takes, by the fetches there were."""
        return self._passage.fetch_seconds(tokens)

    async def export_prefix(self, ids: np.ndarray, start: int = 0) -> Parcel:
        """The pages of the first tokens `ids` that are cached; see `Passage.export`."""
        return await self._passage.export(ids, start)

    async def ingest_prefix(self, ids: np.ndarray, parcel: Parcel) -> int:
        """Caches pages of the first tokens `ids`, as another engine exported them, as far as there
        is room; returns how many tokens of `ids` are cached then. See `Passage.ingest`.

        Raises ValueError if the engine has other weights by now.
        """
        await self._ready()
        landed, version = await self._passage.land(parcel), parcel.version
        async with self._turn:
            check(version == self.version, f"{version=} is not version={self.version}")
            return await self._passage.ingest(ids, landed)

    async def serve(self) -> None:
        """Runs until cancelled; then every request ends with Finish.ABORT. A fault of the device
        ends every one with Refused(500) and is raised here; the next call begins without caches."""
        check(not self._serving, "serve() is already running")
        self._serving, self._closed = True, None
        try:
            await self._ready()
            if self._failure is not None:
                await self._on_device(self._runner.allocate)
                self._scheduler.renew(self._root())
                self._failure = None
            await self._rounds()
        except asyncio.CancelledError:
            self._closed = "the engine has stopped"
            self._send(self._scheduler.drain())
            self._scheduler.renew(self._root())
            raise
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._serving = False
            self._changes.ended()

    async def _rounds(self) -> None:
        unread: Flight | None = None
        while True:
            async with self._turn:
                # Slots that an unread round may free are worth more than a round begun early.
                # So is knowing what was sampled where the next token depends on it.
                close = self._scheduler.crowded or self._scheduler.stepwise
                wait = unread is not None and close
                plan = None if wait else self._scheduler.plan()
                refused = self._scheduler.refused()
                self._send(refused)
                # What a refused request had may be what another one waits for.
                idle = plan is None and unread is None and not refused
                if idle:
                    self._wake.clear()
                else:
                    await self._passage.send_down()
                    hold = plan is not None and self._scheduler.goes_on and not close
                    results, unread = await self._on_device(
                        self._runner.advance, plan, unread, hold
                    )
                    if results is not None:
                        self._send(self._scheduler.apply(results))
                    self._changes.ended()
            if idle:
                await self._wake.wait()
                await asyncio.sleep(0)  # callers of the same tick come along

    async def _swap(self, version: int, params: Any) -> None:
        check(version > self.version, f"{version=} is not newer than version={self.version}")
        await self._ready()
        async with self._changes.between(self._rollout.update):
            await self._on_device(self._runner.publish, version, params)
            self._version = version
            self._scheduler.renew(self._root())
            self._passage.renew()

    async def _bring(self, job: Job) -> None:
        """Fetches pages of a waiting job from the tiers below; it is held until then."""
        try:
            await self._ready()
            await self._passage.bring(job.tokens[: job.prompt - 1])
        finally:
            job.held = False
            self._wake.set()

    def _root(self) -> bytes:
        """A key that no page is in the tree under yet."""
        parts = {"version": self._version, "epoch": next(self._epochs)}
        return root_key(parts)

    def _submit(self, request: Request, matcher: Matcher | None) -> Job:
        if self._closed is not None:
            raise Refused(503, self._closed)
        number = next(self._numbers)
        sampling = request.sampling
        check_asked(sampling, self._rollout, self._limits)
        stop = StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None
        seed = seed_of(sampling, self._seed, number)
        job = job_of(request, self._limits, number, seed, stop, time.monotonic(), matcher)
        job.certain = certain_run(self._rollout.certain)
        job.held = self._rollout.tiered and not job.scoring
        self._scheduler.submit(job)
        self._callers[number] = asyncio.Queue()
        self._wake.set()
        return job

    async def _matcher(self, sampling: Sampling) -> Matcher | None:
        """Of a request's grammar, which takes a while to compile."""
        if sampling.grammar is None:
            return None
        check_asked(sampling, self._rollout, self._limits)
        return await self._grammars.matched(sampling.grammar)

    def _send(self, items: Iterable[tuple[int, Chunk | Refused]]) -> None:
        for number, item in items:
            self._callers[number].put_nowait(item)

    def _fail(self, error: Exception) -> None:
        self._failure, self._closed = error, f"the engine failed: {error!r}"
        self._scheduler.drain()
        for inbox in self._callers.values():  # also those whose last chunk the fault swallowed
            refused = Refused(500, self._closed)
            refused.__cause__ = error
            inbox.put_nowait(refused)

    async def _ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._started))
        await self._passage.open()

    async def _on_device(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device, work, *args)
