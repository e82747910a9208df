"""Calls that come again: a retry is one sample, drawn as the first attempt would have been."""

import asyncio
import random

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, Served, chat_of, run, served, slow, text_engine, until

from forge_jax.gateway.call import Call
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.history import Prompt
from forge_jax.gateway.parsers.protocol import PlainText
from forge_jax.gateway.session import Attempt, Session, stable_seed
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.types import Chunk, Finish, Request, Sampling

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


def test_what_counts_no_retries_marks_none() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            up.gateway.open("s", seed=3)
            for count in ("", "0", "00", "-1", "x"):
                headers = {"x-stainless-retry-count": count}
                assert (await up.post(f"/s/s{PATH}", BODY, **headers)).status_code == 200
            assert {turn.finish for turn in up.gateway.close("s")} == {Finish.STOP}

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


async def cut_stream(up: Served, engine: FakeEngine, body: dict, **headers: str) -> None:
    """A client that goes away after the first events of a stream."""
    async with httpx.AsyncClient(base_url=up.url) as client:
        asked = client.stream("POST", f"/s/s{PATH}", json=body | {"stream": True}, headers=headers)
        async with asked as answer:
            await anext(answer.aiter_raw())
    await until(lambda: engine.running == 0)


def test_a_cut_stream_asked_again_whole_is_one_sample() -> None:
    """As Claude Code does; Codex and OpenCode send the same body again, without any mark."""

    async def test() -> None:
        engine = slow(pause=0.02)
        async with served(engine, chat_of("chatml")) as up:
            up.gateway.open("s", seed=3)
            options = {"stream_options": {"include_usage": True}}
            await cut_stream(up, engine, BODY | options)
            await cut_stream(up, engine, BODY | options)
            engine.pause = 0.0
            assert (await up.post(f"/s/s{PATH}", BODY | {"stream": False})).status_code == 200
            turns = up.gateway.close("s")
            assert [t.finish for t in turns] == [Finish.ABORT, Finish.ABORT, Finish.STOP]
            assert {r.sampling.seed for r in engine.requests} == {stable_seed(3, 0)}

    run(test)


@pytest.mark.parametrize("choices", [1, 2])
def test_a_marked_retry_ends_the_attempt_that_still_runs(choices: int) -> None:
    """The gateway may hear of the retry before it hears that the first connection is gone."""

    async def test() -> None:
        engine = slow(pause=0.02)
        body = BODY | {"n": choices}
        async with served(engine, chat_of("chatml")) as up:
            up.gateway.open("s", seed=3)
            first = asyncio.create_task(up.post(f"/s/s{PATH}", body))
            await until(lambda: engine.running == choices)
            engine.pause = 0.0
            again = await up.post(f"/s/s{PATH}", body, **{"x-stainless-retry-count": "1"})
            assert again.status_code == 200
            assert (await first).status_code == 410
            later = await up.post(f"/s/s{PATH}", body)  # on purpose, and drawn on its own
            assert later.status_code == 200
            turns = up.gateway.close("s")
            assert [t.finish for t in turns] == choices * [Finish.ABORT] + 2 * choices * [
                Finish.STOP
            ]
            seeds = [r.sampling.seed for r in engine.requests[::choices]]
            assert seeds == [stable_seed(3, k) for k in (0, 0, 1)]

    run(test)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_each_draw_is_one_sample_at_most(seed: int) -> None:
    """Over random orders of attempts that finish, fail, break off or are asked again."""
    rng = random.Random(seed)
    session = Session("s", chat_of("chatml"))
    running: list[Call] = []
    intended = 0  # requests of which an answer was received and kept
    for _ in range(200):
        if running and rng.random() < 0.5:
            call = running.pop(rng.randrange(len(running)))
            fate = rng.choice(["delivered", "gone", "refused", "cut at the end"])
            if fate == "delivered" and not call.aborted:
                finish(session, call)
                call.delivered = True
                intended += 1
            elif fate == "refused":
                session.refuse(call)
            else:
                if fate == "cut at the end":
                    finish(session, call)
                session.abort(call)
                session.abort(call)  # a failure may be noticed twice
        else:
            digest, retried = bytes([rng.randrange(3)]), rng.random() < 0.2
            live = [c for c in session.calls.values() if c.digest == digest and not c.aborted]
            failed = digest in session._failed
            attempt = session.arrive(digest, retried)
            if retried and live and not failed:
                assert live[-1].aborted
                assert (attempt.draw, attempt.resent) == (live[-1].draw, True)
                intended -= live[-1].completions[0].started
            call = call_of(session, attempt)
            session.begin(call)
            running.append(call)
    kept = [call.draw for call in session.calls.values() if not call.aborted]
    assert len(kept) == len(set(kept))
    turns = session.turns()
    assert sum(turn.finish is not Finish.ABORT for _, _, turn in turns) == intended
    assert {c.draw for c, _, turn in turns if turn.finish is not Finish.ABORT} <= set(kept)


def call_of(session: Session, attempt: Attempt) -> Call:
    prompt = Prompt(ids=np.array([attempt.number], np.int32), text="")
    completion = Completion(
        place=(attempt.number, 0),
        name=str(attempt.number),
        request=Request(prompt=prompt.ids, sampling=Sampling()),
        parent=None,
        lineage=session.lineage(attempt, prompt, None, None, ()),
        tokenizer=ByteTokenizer(),
        parser=PlainText(),
    )
    return Call(
        number=attempt.number,
        draw=attempt.draw,
        id=session.call_id(attempt.number),
        digest=attempt.digest,
        prompt=prompt,
        arrived=0.0,
        hints={},
        completions=(completion,),
    )


def finish(session: Session, call: Call) -> None:
    ids = np.array([65], np.int32)
    chunk = Chunk(ids=ids, logprobs=ids * np.float32(0), versions=ids, finish=Finish.STOP)
    call.completions[0].take(chunk, 0.0)
    session.learn(call.completions[0])
