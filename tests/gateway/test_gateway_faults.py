"""An engine that refuses, fails or stops: what the client is told, and what is recorded."""

import dataclasses
from collections.abc import AsyncIterator

import openai
import pytest
from fake_engine import FakeEngine, chat_of, run, served

from forge_jax.types import Chunk, Finish, Refused, Request

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusals_are_passed_on(status: int, stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        code = "context_length_exceeded" if status == 400 else None
        engine = FakeEngine(lambda _: Refused(status, "too much", code))
        async with served(engine, chat) as up:
            with pytest.raises(openai.APIStatusError) as caught:
                await up.of("s").chat.completions.create(model="m", messages=USER, stream=stream)
            assert caught.value.status_code == status
            assert caught.value.code == code
            assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))
            assert await up.turns("s") == []  # nothing was sampled

    run(test)


def test_a_refusal_of_one_choice_is_the_answer() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        ids = [*b"abcdefgh", 258]
        engine = FakeEngine(
            lambda r: Refused(429, "full") if r.sampling.choice == 2 else ids, pause=0.01
        )
        async with served(engine, chat) as up:
            answer = await up.post("/s/s/v1/chat/completions", {"messages": USER, "n": 3})
            assert answer.status_code == 429
            assert engine.running == 0

    run(test)


def test_a_fault_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        chat = chat_of("chatml")

        def fail(_: object) -> list[int]:
            raise ZeroDivisionError("deep inside")

        async with served(FakeEngine(fail), chat) as up:
            answer = await up.post("/v1/chat/completions", {"messages": USER})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "deep inside" not in answer.text
            assert "deep inside" in caplog.text

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_stops_midway(stream: bool) -> None:
    class Stopping(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Chunk]:
            async for chunk in super().generate(request):
                last = chunk.finish is not None
                yield dataclasses.replace(chunk, finish=Finish.ABORT) if last else chunk

    async def test() -> None:
        chat = chat_of("chatml")
        async with served(Stopping(lambda _: [*b"abcdefgh"]), chat) as up:
            answer = await up.post("/s/s/v1/chat/completions", {"messages": USER, "stream": stream})
            assert answer.status_code == (200 if stream else 503)
            assert "the engine stopped" in answer.text
            assert '"finish_reason":"' not in answer.text
            (turn,) = await up.turns("s")
            assert turn["finish_reason"] == "abort"

    run(test)
