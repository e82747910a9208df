"""The rollout engine: requests in, chunks of sampled tokens out.

Host logic runs on the event loop, everything of the device on the one thread of the executor
it shares with the trainer. Invariant: every request ends exactly once, by a chunk with a
finish reason, by `Refused`, or by its caller closing the iterator.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from forge_jax.config import RolloutConfig, UserError, check
from forge_jax.models.config import ModelConfig
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.rollout import programs
from forge_jax.rollout.jobs import Job, Limits, row_of, seed_of
from forge_jax.rollout.runner import Flight, Runner
from forge_jax.rollout.scheduler import Scheduler
from forge_jax.rollout.stop import StopStrings
from forge_jax.types import Chunk, Finish, Refused, Request

T = TypeVar("T")


def check_model(rollout: RolloutConfig, cfg: ModelConfig) -> None:
    """Raises UserError where an engine of these sizes cannot serve such a model."""
    if rollout.context > cfg.max_context:
        raise UserError(
            f"rollout.context={rollout.context} is beyond the model's max_context={cfg.max_context}"
        )
    if rollout.routes and not cfg.experts:
        raise UserError("rollout.routes=True: the model has no experts to record")


class RolloutEngine:
    """Continuous batching over static slots; implements `types.Engine`.

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

        Raises UserError if a sequence may be longer than the model was made for, or routes are
        to be recorded of a model without experts.
        """
        check_model(rollout, cfg)
        self._limits = Limits(context=rollout.context, vocab=cfg.vocab, stop_ids=tuple(stop_ids))
        self._tokenizer = tokenizer
        self._seed = seed
        self._numbers = itertools.count()
        self._scheduler = Scheduler(rollout)
        self._callers: dict[int, asyncio.Queue[Chunk | Refused]] = {}
        self._wake = asyncio.Event()
        self._serving = False
        self._closed: str | None = None  # why no request is taken
        self._failure: Exception | None = None
        self._device = device
        self._runner = Runner(cfg, rollout, version)
        self._started = device.submit(self._runner.start, params)

    @property
    def version(self) -> int:
        """Version of the weights that the next device call samples from."""
        return self._runner.version

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals, for logs and metrics."""
        counts = self._scheduler.counts
        rounds = counts["slot_rounds"]
        return {
            "requests_running": self._scheduler.running,
            "requests_waiting": self._scheduler.waiting,
            "requests_submitted": counts["submitted"],
            **{f"requests_{finish}": counts[finish] for finish in Finish},
            "tokens_sampled": counts["sampled"],
            "tokens_prefilled": counts["prefill_tokens"],
            "prefill_calls": counts["prefill_calls"],
            "decode_calls": counts["decode_calls"],
            "slot_utilisation": counts["busy_slot_rounds"] / rounds if rounds else 0.0,
            "swaps": self._runner.swaps,
            "weight_version": self.version,
            "programs_traced": programs.traces.total(),
        }

    async def warm_up(self) -> None:
        """Compiles every shape the engine can meet; call it before serving."""
        check(not self._serving, "warm_up() while serving")
        await self._ready()
        await self._on_device(self._runner.warm_up)

    async def swap(self, version: int, params: Any) -> None:
        """Copies `params` and samples from the copy from the next device call on.

        Requests in flight go on with the keys and values they have. The caller may donate
        `params` once this returns. Raises ValueError if the version goes back or the
        parameters do not look like the first ones.
        """
        check(version >= self.version, f"{version=} is older than version={self.version}")
        await self._ready()
        await self._on_device(self._runner.publish, version, params)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as they are decoded; see `types.Engine`."""
        number = self._submit(request)
        inbox = self._callers[number]
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Refused):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            del self._callers[number]
            self._scheduler.abandon(number)

    async def serve(self) -> None:
        """Runs until cancelled; then every request ends with Finish.ABORT.

        A fault of the device ends every request with Refused(500) and is raised here.
        """
        check(not self._serving, "serve() is already running")
        if self._failure is not None:
            raise RuntimeError("the engine has failed before") from self._failure
        self._serving, self._closed = True, None
        try:
            await self._ready()
            await self._rounds()
        except asyncio.CancelledError:
            self._closed = "the engine has stopped"
            for number, chunk in self._scheduler.drain():
                self._callers[number].put_nowait(chunk)
            raise
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._serving = False

    async def _rounds(self) -> None:
        unread: Flight | None = None
        while True:
            # Slots that an unread round may free are worth more than a round begun early.
            wait = unread is not None and self._scheduler.crowded
            plan = None if wait else self._scheduler.plan()
            if plan is None and unread is None:
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(0)  # callers of the same tick come along
                continue
            hold = plan is not None and self._scheduler.goes_on and not self._scheduler.crowded
            results, unread = await self._on_device(self._runner.advance, plan, unread, hold)
            if results is not None:
                for number, chunk in self._scheduler.apply(results):
                    self._callers[number].put_nowait(chunk)

    def _submit(self, request: Request) -> int:
        if self._closed is not None:
            raise Refused(503, self._closed)
        number = next(self._numbers)
        sampling = request.sampling
        row = row_of(request, self._limits, seed_of(sampling, self._seed, number))
        stop = StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None
        self._scheduler.submit(Job(number, row, stop, time.monotonic()))
        self._callers[number] = asyncio.Queue()
        self._wake.set()
        return number

    def _fail(self, error: Exception) -> None:
        self._failure, self._closed = error, f"the engine failed: {error!r}"
        self._scheduler.drain()
        for inbox in self._callers.values():  # also those whose last chunk the fault swallowed
            refused = Refused(500, self._closed)
            refused.__cause__ = error
            inbox.put_nowait(refused)

    async def _ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def _on_device(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device, work, *args)
