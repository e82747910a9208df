"""Calls that come again: a retry is one sample, drawn as the first attempt would have been."""

import asyncio

import httpx
import pytest
from fake_engine import chat_of, run, served, slow, text_engine, until

from forge_jax.gateway.session import stable_seed
from forge_jax.types import Finish

USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_an_aborted_turn(stream: bool) -> None:
    """And its retry is one sample, drawn as the first attempt would have been."""

    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow(pause=0.5)
        async with served(engine, chat) as up:
            up.gateway.open("s", seed=3)
            body = BODY | {"stream": stream}
            async with httpx.AsyncClient(base_url=up.url, timeout=0.2) as impatient:
                with pytest.raises(httpx.ReadTimeout):
                    await impatient.post(f"/s/s{PATH}", json=body)
            await until(lambda: engine.running == 0)
            assert engine.aborted == 1
            engine.pause = 0.0
            other = {"messages": [{"role": "user", "content": "else"}]}
            await up.post(f"/s/s{PATH}", other)
            await up.post(f"/s/s{PATH}", body)
            await up.post(f"/s/s{PATH}", body)  # no retry: the client asks again
            finishes = [turn.finish for turn in up.gateway.close("s")]
            assert finishes == [Finish.ABORT, *[Finish.STOP] * 3]
            seeds = [r.sampling.seed for r in engine.requests]
            assert seeds == [stable_seed(3, k) for k in (0, 1, 0, 2)]
            assert [r.facts.call for r in engine.requests] == [0, 1, 2, 3]

    run(test)


def test_a_marked_retry_replaces_an_answer_that_never_arrived() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "x")
        async with served(engine, chat) as up:
            up.gateway.open("s", seed=3)
            for retries in ("0", "1", "2"):
                headers = {"x-stainless-retry-count": retries}
                assert (await up.post(f"/s/s{PATH}", BODY, **headers)).status_code == 200
            turns = up.gateway.close("s")
            assert [t.finish for t in turns] == [Finish.ABORT, Finish.ABORT, Finish.STOP]
            assert {r.sampling.seed for r in engine.requests} == {stable_seed(3, 0)}

    run(test)


def test_retries_of_the_official_client_are_one_sample() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow()
        async with served(engine, chat) as up:
            up.gateway.open("s", seed=3)

            async def recover() -> None:
                await until(lambda: engine.aborted == 1)
                engine.pause = 0.0

            recovering = asyncio.create_task(recover())
            patient = up.of("s").with_options(max_retries=2, timeout=0.3)
            answer = await patient.chat.completions.create(model="m", messages=USER)
            assert answer.choices[0].message.content == "x" * 100
            await recovering
            turns = up.gateway.close("s")
            assert [t.finish for t in turns] == [Finish.ABORT, Finish.STOP]
            assert len({r.sampling.seed for r in engine.requests}) == 1

    run(test)
