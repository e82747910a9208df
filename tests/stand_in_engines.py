"""Servers that speak the APIs of vLLM and SGLang over HTTP, with our own engine behind them.

What they accept and tell is written after the sources of vLLM 0.32 and SGLang 0.5; a body with a
field that those do not know is an error of the test.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from forge_jax.config import RolloutConfig
from forge_jax.gateway.server import serving as http_server
from forge_jax.models.hf import import_folder
from forge_jax.models.load import LoadedModel
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Chunk, Refused, Sampling
from forge_jax.types import Request as Asked

VLLM = {
    "model", "prompt", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed",
    "stop_token_ids", "ignore_eos", "structured_outputs", "logprobs", "return_token_ids",
    "return_tokens_as_token_ids", "stream", "stream_options",
}  # fmt: skip
SGLANG = {
    "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "stream",
}  # fmt: skip
SGLANG_SAMPLING = {
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos",
    "logit_bias", "sampling_seed", "json_schema",
}  # fmt: skip


class SlowDevice(ThreadPoolExecutor):
    """Takes its time, so that something can come between two rounds of an engine."""

    seconds = 0.0  # before every job

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(self._slowly, work, *args, **more)

    def _slowly(self, work: Any, *args: Any, **more: Any) -> Any:
        time.sleep(self.seconds)
        return work(*args, **more)


@dataclass
class StandIn:
    """One server. What it does wrong, if anything, is said by the fields."""

    engine: RolloutEngine
    context: int
    device: SlowDevice  # of the engine
    raw: bool = False  # log-probs of softmax(logits), whatever the temperature
    deaf: bool = False  # to seeds
    bodies: list[dict[str, Any]] = field(default_factory=list)  # as they came
    calls: list[str] = field(default_factory=list)  # orders

    async def slowed(self, seconds: float, requests: int) -> None:
        """Until a pause the device is slow, from when so many requests have tokens."""
        while self.engine.stats()["requests_running"] < requests:
            await asyncio.sleep(0)
        sampled = self.engine.stats()["tokens_sampled"]
        while self.engine.stats()["tokens_sampled"] < sampled + 4 * requests:
            await asyncio.sleep(0)
        self.device.seconds = seconds

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(self._healthy)
        app.get("/v1/models")(
            lambda: {"data": [{"id": "tiny", "max_model_len": self.context}]},
        )
        for path, handler in (
            ("/v1/completions", self._vllm),
            ("/generate", self._sglang),
            ("/pause", self._pause),
            ("/pause_generation", self._pause),
            ("/collective_rpc", self._reload),
            ("/update_weights_from_disk", self._reload),
            ("/reset_prefix_cache", self._reset),
            ("/resume", self._resume),
            ("/continue_generation", self._resume),
        ):
            app.post(path)(handler)
        return app

    async def _healthy(self) -> Mapping[str, Any]:
        return {}

    async def _vllm(self, request: Request) -> Any:
        body = await request.json()
        assert body.keys() <= VLLM, body.keys() - VLLM
        self.bodies.append(body)
        assert body["model"] == "tiny"
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            told = f"This model's maximum context length is {self.context} tokens"
            return JSONResponse({"error": {"message": told, "code": 400}}, 400)
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "min_tokens")
        names += ("frequency_penalty", "repetition_penalty", "max_tokens", "ignore_eos")
        sampling = self._sampling(
            {name: body[name] for name in names},
            seed=body["seed"], bias=body["logit_bias"], top=body["logprobs"],
            stop_ids=body["stop_token_ids"],
        )  # fmt: skip

        def told(chunk: Chunk) -> Iterator[dict[str, Any]]:
            logprobs = {
                "token_logprobs": self._logprobs(chunk, sampling),
                "top_logprobs": [
                    {f"token_id:{t}": float(lp) for t, lp in zip(*row, strict=True)}
                    for row in self._tops(chunk)
                ],
            }
            yield {
                "choices": [
                    {
                        "token_ids": chunk.ids.tolist(),
                        "logprobs": logprobs,
                        "finish_reason": chunk.finish,
                    }
                ]
            }
            if chunk.finish is not None:
                yield {"choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}

        return await self._stream(body["prompt"], sampling, told)

    async def _sglang(self, request: Request) -> Any:
        body = await request.json()
        assert body.keys() <= SGLANG, body.keys() - SGLANG
        self.bodies.append(body)
        said = body["sampling_params"]
        assert said.keys() <= SGLANG_SAMPLING, said.keys() - SGLANG_SAMPLING
        if len(body["input_ids"]) + said["max_new_tokens"] > self.context:
            told = f"The input is longer than the model's context length ({self.context} tokens)"
            return JSONResponse({"error": {"message": told}}, 400)
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        names += ("repetition_penalty", "ignore_eos")
        sampling = self._sampling(
            {name: said[name] for name in names}
            | {"max_tokens": said["max_new_tokens"], "min_tokens": said["min_new_tokens"]}
            | {"top_k": max(0, said["top_k"])},
            seed=said.get("sampling_seed"), bias=said.get("logit_bias"),
            top=body["top_logprobs_num"], stop_ids=said["stop_token_ids"],
        )  # fmt: skip
        so_far: list[list[Any]] = []
        tops: list[list[list[Any]]] = []

        def told(chunk: Chunk) -> Iterator[dict[str, Any]]:
            logprobs = self._logprobs(chunk, sampling)
            so_far.extend([lp, t, None] for lp, t in zip(logprobs, chunk.ids.tolist(), strict=True))
            tops.extend(
                [[float(lp), int(t), None] for t, lp in zip(*row, strict=True)]
                for row in self._tops(chunk)
            )
            reason = None if chunk.finish is None else {"type": chunk.finish}
            meta = {"output_token_logprobs": so_far, "output_top_logprobs": tops}
            yield {"meta_info": meta | {"completion_tokens": len(so_far), "finish_reason": reason}}

        return await self._stream(body["input_ids"], sampling, told)

    def _sampling(self, said: dict[str, Any], seed: Any, bias: Any, **more: Any) -> Sampling:
        return Sampling(
            **said,
            seed=None if self.deaf else seed,
            logit_bias=tuple((int(t), b) for t, b in (bias or {}).items()),
            stop_ids=tuple(more["stop_ids"]),
            top_logprobs=more["top"],
        )

    def _logprobs(self, chunk: Chunk, sampling: Sampling) -> list[float]:
        """Both engines tell plain log-probs where sampling is greedy."""
        plain = self.raw or sampling.temperature == 0
        told = chunk.raw if plain and chunk.raw is not None else chunk.logprobs
        return told.astype(float).tolist()

    def _tops(self, chunk: Chunk) -> list[tuple[np.ndarray, np.ndarray]]:
        if chunk.top_ids is None or chunk.top_logprobs is None:
            return []
        return list(zip(chunk.top_ids, chunk.top_logprobs, strict=True))

    async def _stream(
        self, prompt: list[int], sampling: Sampling, told: Callable[[Chunk], Iterator[Any]]
    ) -> StreamingResponse:
        chunks = self.engine.generate(Asked(prompt=np.array(prompt, np.int32), sampling=sampling))

        async def lines() -> AsyncIterator[str]:
            try:
                async for chunk in chunks:
                    for event in told(chunk):
                        yield f"data: {json.dumps(event)}\n\n"
                yield "data: [DONE]\n\n"
            except Refused as refused:
                fault = {"error": {"message": str(refused), "code": refused.status}}
                yield f"data: {json.dumps(fault)}\n\n"
            finally:
                await chunks.aclose()

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def _pause(self, request: Request) -> Mapping[str, Any]:
        self.calls.append("pause")
        if request.url.path == "/pause":
            assert request.query_params["mode"] == "abort"
        else:
            assert await request.json() == {"mode": "abort"}
        self.device.seconds = 0.0
        await self.engine.pause("abort")
        return {"status": "paused"}

    async def _reload(self, request: Request) -> Mapping[str, Any]:
        self.calls.append("load")
        body = await request.json()
        if request.url.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            path = body["kwargs"]["weights_path"]
        else:
            assert body["flush_cache"] is True
            path = body["model_path"]
        _, params = await asyncio.to_thread(import_folder, path)
        await self.engine.swap(self.engine.version + 1, params)
        return {"success": True, "message": "loaded"}

    async def _reset(self) -> Mapping[str, Any]:
        self.calls.append("reset")
        return {"success": True}

    async def _resume(self) -> Mapping[str, Any]:
        self.calls.append("resume")
        self.engine.resume()
        return {}


@asynccontextmanager
async def standing(
    engine: RolloutEngine, context: int, device: SlowDevice
) -> AsyncIterator[tuple[StandIn, str]]:
    """A stand-in before `engine`, which somebody else serves, and its URL."""
    stand_in = StandIn(engine, context, device)
    async with http_server(stand_in.app(), "127.0.0.1", 0, 0.1, lambda: None) as url:
        yield stand_in, url


@contextmanager
def standing_apart(model: LoadedModel, rollout: RolloutConfig) -> Iterator[str]:
    """A stand-in with an event loop of its own, for commands that block: its URL."""
    ready, ended, found = threading.Event(), threading.Event(), []

    async def run() -> None:
        with SlowDevice(1) as device:
            engine = RolloutEngine(
                model.cfg, model.params, model.chat.stop_ids, rollout, model.chat.tokenizer, device
            )
            task = asyncio.create_task(engine.serve())
            async with standing(engine, rollout.context, device) as (_, url):
                found.append(url)
                ready.set()
                await asyncio.to_thread(ended.wait)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(60), "the stand-in did not come up"
        yield found[0]
    finally:
        ended.set()
        thread.join()
