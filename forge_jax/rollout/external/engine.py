"""An engine elsewhere (vLLM, SGLang) behind the interface of our own.

Requests flow out over HTTP and come back as chunks; weights flow out through a folder that both
sides see. Invariant: a token's version is the one that sampled it. New requests wait while weights
change, running ones end first or are cut short there, and what is cut goes on as a new request,
from all tokens it has.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from forge_jax.config import ExternalConfig, check
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.rollout.external import wire
from forge_jax.rollout.external.dialect import Ask, Dialect, Order, Piece, bounded
from forge_jax.rollout.external.probe import check_told, key_of, served_model
from forge_jax.rollout.external.published import Folder
from forge_jax.rollout.external.running import ENDS, Running
from forge_jax.rollout.external.sglang import Sglang
from forge_jax.rollout.external.vllm import Vllm
from forge_jax.rollout.stop import StopStrings
from forge_jax.types import Chunk, Finish, Refused, Request

LATE_SECONDS = 2.0  # after a pause, until a stream that has not ended is closed from here
HEALTH_SECONDS = 5.0  # between two looks

DIALECTS: Mapping[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}


class ExternalEngine:
    """Implements `policy.PolicyEngine`.

    `folder` takes weights; None where the engine's own are never replaced. `context` bounds
    sequences, and so does the engine. Of the event loop alone.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        cfg: ExternalConfig,
        *,
        context: int | None,
        stop_ids: Iterable[int],
        tokenizer: Tokenizer,
        folder: Folder | None,
        version: int = 0,
    ):
        self._dialect, self._url, self._cfg = DIALECTS[kind], url, cfg
        self._http = wire.client(url, key_of(cfg))
        self._context, self._stop_ids = context, tuple(stop_ids)
        self._tokenizer, self._folder = tokenizer, folder
        self._version = version
        self._model = ""
        self._open = asyncio.Event()  # no weights are being replaced
        self._open.set()
        self._epoch = 0  # updates begun
        self._streams: set[asyncio.Task[None]] = set()
        self._active = 0  # completions that have begun and not ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed: str | None = None  # why no request is taken
        self._counts = dict.fromkeys(("requests_submitted", "swaps", "requests_continued"), 0)

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from."""
        return self._version

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals, for logs and metrics."""
        return {
            **self._counts,
            "requests_running": self._active,
            "weight_version": self._version,
        }

    async def warm_up(self) -> None:
        """Learns the engine's model and limits, and sees that it tells what is needed.

        Raises UserError where nothing answers, or tells something else.
        """
        try:
            self._model, most = await served_model(self._http, self._url)
            self._context = most if self._context is None else min(self._context, most)
            await check_told(self._http, self._dialect, self._model, self._cfg.seeds, self._url)
        except BaseException:
            await self._http.aclose()
            raise

    async def serve(self) -> None:
        """Watches the engine until cancelled, then ends every request with Finish.ABORT.

        Raises Refused where it has not answered for ``external.patience_seconds``.
        """
        try:
            silent = 0.0
            while True:
                await asyncio.sleep(HEALTH_SECONDS)
                try:
                    await wire.get(self._http, "/health")
                    silent = 0.0
                except Refused:
                    silent += HEALTH_SECONDS
                    if silent >= self._cfg.patience_seconds:
                        raise
        finally:
            self._closed = f"the engine at {self._url} is not served any more"
            self._cut(self._streams)
            await self._http.aclose()

    async def swap(self, version: int, params: Any) -> None:
        """Writes `params` to the folder and has the engine read them, as `version`.

        What becomes of running requests is said by ``external.update``: "recompute" goes on with
        them from all tokens they have, "wait" lets them end first, "abort" ends them. The caller
        may donate `params` once this returns; an update that has begun goes on if the caller is
        cancelled. Raises ValueError if the version goes back, Refused where the engine fails:
        then its weights are unknown, and it takes no requests.
        """
        check(version >= self._version, f"{version=} is older than version={self._version}")
        assert self._folder is not None, "an engine without a folder keeps its weights"
        await asyncio.shield(asyncio.ensure_future(self._swap(self._folder, version, params)))

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as the engine tells of them; see `types.Engine`."""
        running = self._begun(request)
        await self._opened()
        self._counts["requests_submitted"] += 1
        self._active += 1
        self._idle.clear()
        try:
            while True:
                async with aclosing(self._stretch(running)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                        if chunk.finish is not None:
                            return
                running.stretch += 1
                self._counts["requests_continued"] += 1
                await self._opened()
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _stretch(self, running: Running) -> AsyncGenerator[Chunk, None]:
        """Chunks under one version. Without a finish at the end where an update cut it short and
        the rest can be asked for."""
        version, epoch = self._version, self._epoch
        inbox: asyncio.Queue[Piece | Refused | None] = asyncio.Queue()
        body = self._dialect.body(self._ask(running))
        stream = asyncio.create_task(self._pump(body, running.request.sampling.top_logprobs, inbox))
        self._streams.add(stream)
        try:
            while True:
                piece = await inbox.get()
                if isinstance(piece, Refused):
                    if self._epoch == epoch:
                        raise piece
                    piece = None  # of an engine that was told to end it
                if piece is not None and (len(piece.ids) or piece.finish in ENDS):
                    chunk = running.chunk(piece, version)
                    yield chunk
                    if chunk.finish is not None:
                        return
                if piece is None or piece.finish is Finish.ABORT:
                    if self._epoch != epoch and self._goes_on(running):
                        return
                    yield running.ending()
                    return
        finally:
            stream.cancel()
            await asyncio.wait((stream,))
            self._streams.discard(stream)

    async def _pump(
        self, body: Mapping[str, Any], top: int, inbox: "asyncio.Queue[Piece | Refused | None]"
    ) -> None:
        """Everything a stream tells, then None; a task of its own, so that it can be cut."""
        seen = 0
        try:
            async with aclosing(wire.events(self._http, self._dialect.generate, body)) as stream:
                async for event in stream:
                    piece = self._dialect.read(event, seen, top)
                    seen += len(piece.ids)
                    inbox.put_nowait(piece)
        except Refused as refused:
            inbox.put_nowait(refused)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            told = f"the engine's stream is not understood: {error!r}"
            inbox.put_nowait(Refused(502, told))
        finally:
            inbox.put_nowait(None)

    def _begun(self, request: Request) -> Running:
        """Raises Refused where it cannot be asked for."""
        if self._closed is not None:
            raise Refused(503, self._closed)
        assert self._context is not None, "warm_up() comes first"
        room, sampling = self._context - len(request.prompt), request.sampling
        if room < 1:
            message = (
                f"the prompt has {len(request.prompt)} tokens; a sequence may have "
                f"{self._context}, with at least one of them sampled"
            )
            raise Refused(400, message, code=wire.OVERFLOW)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        stop = StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None
        running = Running(request, stop, limit)
        self._dialect.body(self._ask(running))  # refused now rather than behind an update
        return running

    def _ask(self, running: Running) -> Ask:
        sampling, output = running.request.sampling, np.array(running.output, np.int32)
        ids = () if sampling.ignore_eos else {*self._stop_ids, *sampling.stop_ids}
        return Ask(
            prompt=np.concatenate([running.request.prompt, output]),
            sampling=sampling,
            model=self._model,
            max_tokens=running.left,
            min_tokens=max(0, min(sampling.min_tokens, running.limit) - len(output)),
            stop_ids=tuple(sorted(ids)),
            stretch=running.stretch,
        )

    def _goes_on(self, running: Running) -> bool:
        """Whether the rest of what an update cut short is to be asked for."""
        kept = self._cfg.update != "abort" and bounded(running.request.sampling) is None
        return kept and running.left > 0

    async def _swap(self, folder: Folder, version: int, params: Any) -> None:
        path = await folder.publish(version, params)  # while the engine goes on
        self._open.clear()
        self._epoch += 1
        if self._cfg.update == "wait":
            await self._idle.wait()
        try:
            await self._order(self._dialect.pause())
            if self._streams:
                # What the engine has sent is still taken in; whatever began too late to be ended
                # by the pause waits at the engine, and is asked for again.
                _, late = await asyncio.wait(self._streams, timeout=LATE_SECONDS)
                self._cut(late)
            for order in self._dialect.load(str(path), version):
                await self._order(order)
            await self._order(self._dialect.resume())
            self._version = version
            self._counts["swaps"] += 1
        except Refused as refused:
            self._closed = f"the weights of the engine are unknown: {refused}"
            raise
        finally:
            self._open.set()
        folder.forget(version)

    async def _opened(self) -> None:
        """Waits while weights are replaced. Raises Refused where that has failed."""
        while not self._open.is_set():
            await self._open.wait()
        if self._closed is not None:
            raise Refused(503, self._closed)

    async def _order(self, order: Order) -> None:
        await wire.post(self._http, order.path, order.body)

    @staticmethod
    def _cut(streams: Iterable["asyncio.Task[None]"]) -> None:
        for stream in streams:
            stream.cancel()
