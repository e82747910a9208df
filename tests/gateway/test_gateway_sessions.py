"""Sessions: whose a call is, how its calls are drawn, and what is kept of them."""

import asyncio
import json
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest
from fake_engine import ADMIN, FakeEngine, chat_of, run, served, slow, text_engine, until

from forge_jax.drawing import COLDEST
from forge_jax.gateway.session import Session, stable_seed
from forge_jax.types import Chunk, Finish, Request

USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER}
PATH = "/v1/chat/completions"


def test_path_beats_header_beats_key() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            header, key = {"x-forge-session": "h"}, {"authorization": "Bearer k"}
            for path, headers in [
                (f"/s/p{PATH}", header | key),
                (PATH, header | key),
                (PATH, key),
                (PATH, {"x-api-key": "k"}),
                ("/s/a%2Fb" + PATH, {}),
                (PATH, {}),
            ]:
                hints = {"x-session-id": "theirs", "x-unknown": "1"}
                answer = await up.http.post(path, json=BODY, headers=headers | hints)
                assert answer.status_code == 200
            for session, count in [("p", 1), ("h", 1), ("k", 2), ("a/b", 1)]:
                turns = await up.turns(session)
                assert len(turns) == count
                assert turns[0]["hints"] == {"x-session-id": "theirs"}

    run(test)


def test_the_record_needs_the_admin_key() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            await up.post(f"/s/a{PATH}", BODY)
            for headers in ({}, {"authorization": "Bearer é"}, {"authorization": "Basic " + ADMIN}):
                raw = {name: value.encode() for name, value in headers.items()}
                answer = await up.http.get("/sessions/a", headers=raw)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            admin = {"authorization": f"Bearer {ADMIN}"}
            assert (await up.http.get("/sessions/b", headers=admin)).status_code == 404
            (turn,) = await up.turns("a")
            assert turn["output_ids"] == [ord("x"), 258]
            assert turn["logprobs"] == [0.0, -0.125]
            assert turn["versions"] == [7, 7]
            assert (turn["finish_reason"], turn["parent"]) == ("stop", None)
            assert turn["seconds"] >= 0
            assert turn["queue_seconds"] == 0.25

    run(test)


def test_a_session_draws_the_same_again() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "x")
        async with served(engine, chat) as up:
            seeds = []
            for _ in range(2):
                up.gateway.open("s", seed=5, temperature=0.5)
                for own in (None, 99, None):
                    answer = await up.post(f"/s/s{PATH}", BODY | {"seed": own})
                    assert answer.status_code == 200
                turns = up.gateway.close("s")
                assert [turn.temperature for turn in turns] == [0.5] * 3
                seeds.append([r.sampling.seed for r in engine.requests[-3:]])
            assert seeds[0] == seeds[1] == [stable_seed(5, 0), 99, stable_seed(5, 2)]
            assert len({stable_seed(a, b) for a in range(50) for b in range(50)}) == 2500
            # Without a declaration the engine draws a seed, and the temperature is 1.
            await up.post(PATH, BODY)
            assert engine.requests[-1].sampling.seed is None
            await up.post(f"/s/s{PATH}", BODY | {"temperature": 0})
            assert [r.sampling.temperature for r in engine.requests[-2:]] == [1.0, 0]
            await up.post(f"/s/cold{PATH}", BODY | {"temperature": 1e-8})
            assert [t["temperature"] for t in await up.turns("cold")] == [COLDEST]

    run(test)


def test_ids_of_calls_are_made_of_what_a_session_is_opened_with() -> None:
    chat = chat_of("chatml")
    one, other = (Session(name, chat, ids="train-0-0") for name in "ab")
    assert one.call_id(3) == other.call_id(3)
    plain = [Session(name, chat).call_id(3) for name in "ab"]
    assert len({one.call_id(3), one.call_id(4), *plain}) == 4


def test_opening_and_closing() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, undeclared=False) as up:
            refused = await up.post(f"/s/s{PATH}", BODY)
            assert refused.json()["error"]["code"] == "session_not_found"
            up.gateway.open("s")
            with pytest.raises(ValueError, match="'s' is already open"):
                up.gateway.open("s")
            assert (await up.post(f"/s/s{PATH}", BODY)).status_code == 200
            assert len(up.gateway.close("s")) == 1
            with pytest.raises(KeyError):
                up.gateway.close("s")
            assert (await up.post(f"/s/s{PATH}", BODY)).status_code == 404

    run(test)


def test_declaring_a_session_ends_its_undeclared_namesake() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow()
        async with served(engine, chat) as up:
            late = asyncio.create_task(up.post(f"/s/s{PATH}", BODY))
            await until(lambda: engine.running == 1)
            up.gateway.open("s")
            assert (await late).status_code == 410
            assert up.gateway.close("s") == ()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_closing_aborts_what_still_runs(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow()
        async with served(engine, chat) as up:
            up.gateway.open("s")
            call = asyncio.create_task(up.post(f"/s/s{PATH}", BODY | {"stream": stream, "n": 2}))
            await until(lambda: engine.running == 2)
            await asyncio.sleep(0.15)
            turns = up.gateway.close("s")
            answer = await call
            assert answer.status_code == (200 if stream else 410)
            assert "the session was closed" in answer.text
            assert [turn.finish for turn in turns] == [Finish.ABORT] * 2
            assert all(0 < len(turn.output) < 100 for turn in turns)
            await until(lambda: engine.running == 0)
            assert engine.aborted == 2

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_not_taken_is_nobodys_as_the_session_closes(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            up.gateway.open("s")
            full, asked = asyncio.Event(), [json.dumps(BODY | {"stream": stream}).encode()]

            async def receive() -> dict:
                if not asked:
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": asked.pop()}

            async def send(message: dict) -> None:
                if message["type"] == "http.response.body":
                    full.set()
                    await asyncio.Event().wait()  # a client that does not read

            scope = {
                "type": "http", "method": "POST", "path": f"/s/s{PATH}", "headers": [],
                "query_string": b"", "root_path": "", "http_version": "1.1",
            }  # fmt: skip
            call = asyncio.create_task(up.gateway.app(scope, receive, send))
            await full.wait()
            [turn] = up.gateway.close("s")
            assert (turn.finish, len(turn.output)) == (Finish.ABORT, 2)
            call.cancel()
            await asyncio.wait([call])

    run(test)


def test_tokens_that_come_as_a_session_closes_change_nothing() -> None:
    class Gated(FakeEngine):
        sampled = 0

        async def generate(self, request: Request) -> AsyncIterator[Chunk]:
            async for chunk in super().generate(request):
                self.sampled += 1
                if self.sampled > 2:
                    await gate.wait()
                yield chunk

    gate = asyncio.Event()

    async def test() -> None:
        engine = Gated(lambda _: [*b"x" * 100, 258], chunk=1)
        async with served(engine, chat_of("chatml")) as up:
            up.gateway.open("s")
            call = asyncio.create_task(up.post(f"/s/s{PATH}", BODY | {"n": 2}))
            await until(lambda: engine.sampled == 4)
            gate.set()
            turns = up.gateway.close("s")
            assert [len(turn.output) for turn in turns] == [1, 1]
            answer = await call
            assert answer.status_code == 410
            assert "the session was closed" in answer.text

    run(test)


def test_many_sessions_at_once_do_not_mix() -> None:
    def reply(request: Request) -> list[int]:
        return [*str(int(request.prompt.sum())).encode(), 258]

    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(reply, chunk=1), chat) as up:

            async def play(number: int) -> None:
                name, talk = f"s{number}", [{"role": "user", "content": f"{number}" * 3}]
                up.gateway.open(name, seed=number)
                client = up.of(name)
                for _ in range(3):
                    answer = await client.chat.completions.create(model="m", messages=talk)
                    talk.append(answer.choices[0].message.model_dump(exclude_none=True))
                    talk.append({"role": "user", "content": "on"})
                turns = up.gateway.close(name)
                assert [turn.parent for turn in turns] == [None, 0, 1]
                for turn in turns:
                    assert turn.output.tolist() == [*str(turn.prompt.sum()).encode(), 258]

            await asyncio.gather(*(play(i) for i in range(64)))

    run(test)


def test_undeclared_sessions_are_forgotten_oldest_first() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, keep_tokens=3000) as up:
            up.gateway.open("declared")
            for i in range(30):
                for name in ("declared", f"u{i}", "shared"):
                    assert (await up.post(f"/s/{name}{PATH}", BODY)).status_code == 200
            assert len(up.gateway._sessions) < 10
            assert len(await up.turns("u29")) == 1
            assert 1 <= len(await up.turns("shared")) < 10
            assert len(up.gateway.close("declared")) == 30

    run(test)


def test_what_is_forgotten_is_not_found_again() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "same"), chat, keep_tokens=1000) as up:
            talk = [{"role": "user", "content": "a"}]
            for _ in range(8):
                await up.post(f"/s/s{PATH}", {"messages": talk})
            talk += [{"role": "assistant", "content": "same"}, {"role": "user", "content": "b"}]
            for _ in range(8):
                await up.post(f"/s/s{PATH}", {"messages": talk})
            turns = await up.turns("s")
            assert len(turns) < 5
            assert all(t["parent"] is None or t["parent"] < i for i, t in enumerate(turns))
            session = up.gateway._sessions.get("s")
            assert session is not None
            known = {c for cs in session.replies._by_key.values() for c in cs}
            assert len(known) == len(turns)
            assert sum(session.replies._lengths.values()) == len(turns)

    run(test)


def test_an_answer_of_nothing_but_its_end() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(lambda _: [258]), chat) as up:
            with pytest.raises(openai.NotFoundError):
                await up.client.models.retrieve("other")
            answer = await up.of("s").chat.completions.create(model="m", messages=USER)
            assert answer.choices[0].message.content == ""
            talk = [*USER, answer.choices[0].message.model_dump(), *USER]
            await up.of("s").chat.completions.create(model="m", messages=talk)
            turns = await up.turns("s")
            assert turns[1]["parent"] == 0
            assert np.array_equal(turns[0]["output_ids"], [258])

    run(test)
