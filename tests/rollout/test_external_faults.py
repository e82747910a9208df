"""Whatever an engine elsewhere does wrong becomes one clear refusal."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from small_engine import ask, prompt, serving

from forge_jax.config import ExternalConfig, UserError, check_engine
from forge_jax.gateway.server import serving as http_server
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.external.engine import ExternalEngine
from forge_jax.types import Refused


def event(**choice: Any) -> str:
    base = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [base | choice]})}\n\n"


def error(message: str, status: int) -> Response:
    return Response(json.dumps({"error": {"message": message, "code": status}}), status)


def asked(answer: Response | None) -> Refused:
    """What a caller sees of an engine that answers so; None: nothing listens any more."""
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "m", "max_model_len": 64}]})
    whole = PlainTextResponse(event(finish_reason="length") + "data: [DONE]\n\n")
    answers = [whole] * 4  # of the questions at the start

    async def complete() -> Response | None:
        return answers.pop(0) if answers else answer

    app.post("/v1/completions", response_model=None)(complete)

    # Log-probs that are the same at every temperature would be those of another distribution.
    likely = event(finish_reason="length", logprobs={"token_logprobs": [-0.1]})
    answers[1] = PlainTextResponse(likely + "data: [DONE]\n\n")

    async def run() -> Refused:
        async with AsyncExitStack() as stack, AsyncExitStack() as up:
            url = await up.enter_async_context(http_server(app, "127.0.0.1", 0, 0.1, lambda: None))
            engine = ExternalEngine(
                "vllm", url, ExternalConfig(), context=None, stop_ids=(),
                tokenizer=ByteTokenizer(), folder=None,
            )  # fmt: skip
            await engine.warm_up()
            await stack.enter_async_context(serving(engine))
            if answer is None:
                await up.aclose()
            return await refused(engine)

    async def refused(engine: ExternalEngine) -> Refused:
        with pytest.raises(Refused) as caught:
            async for _ in engine.generate(ask(prompt(0, 4))):
                pass
        assert engine.stats()["requests_running"] == 0
        return caught.value

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (None, 503, "no engine at"),
        (error("too many", 429), 429, "too many"),
        (error("overloaded", 503), 503, "overloaded"),
        (error("bad key", 401), 502, "401: bad key"),
        (error("boom", 500), 502, "500: boom"),
        (error("top_k must be", 400), 400, "top_k must be"),
        (PlainTextResponse(event()), 502, "broke off"),
        (PlainTextResponse("data: {nonsense\n\n"), 502, "no JSON"),
        (PlainTextResponse('data: {"other": 1}\n\n'), 502, "not understood"),
        (PlainTextResponse(event(finish_reason="bored")), 502, "'bored'"),
        (PlainTextResponse('data: {"error": {"message": "died", "code": 500}}\n\n'), 502, "died"),
    ],
)
def test_faults(answer: Response | None, status: int, said: str) -> None:
    refused = asked(answer)
    assert refused.status == status
    assert said in str(refused)


@pytest.mark.parametrize("told", ["maximum context length is 9", "longer than the model's"])
def test_an_overflow_that_only_the_engine_sees(told: str) -> None:
    assert asked(error(told, 400)).code == "context_length_exceeded"


def test_nothing_there() -> None:
    async def run() -> None:
        engine = ExternalEngine(
            "sglang", "http://127.0.0.1:9", ExternalConfig(), context=None, stop_ids=(),
            tokenizer=ByteTokenizer(), folder=None,
        )  # fmt: skip
        with pytest.raises(UserError, match=r"127\.0\.0\.1:9: no engine"):
            await engine.warm_up()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "url", "external", "said"),
    [
        ("real", "http://a", ExternalConfig(), "engine_url='http://a' goes with"),
        ("vllm", None, ExternalConfig(), "engine_url=null: engine=vllm needs one"),
        ("vllm", "host:80", ExternalConfig(), "must begin with"),
        ("real", None, ExternalConfig(seeds=False), "external goes with"),
    ],
)
def test_settings_that_do_not_go_together(
    engine: str, url: str | None, external: ExternalConfig, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_engine(engine, url, external)
