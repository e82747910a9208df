"""What a session may spend: calls beyond it are refused for good, running ones cut and recorded."""

import asyncio

import anthropic
import openai
import pytest
from fake_engine import FakeEngine, chat_of, run, served, slow

from forge_jax.config import BudgetConfig

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1000},
    "/v1/messages": {"messages": USER, "max_tokens": 1000},
    "/v1/responses": {"input": "hi"},
}
LONG = [*b"abcdefghij" * 2, 258]


def finish_of(path: str, body: dict) -> str:
    """Why an answer ended, in its protocol's words."""
    if path == "/v1/messages":
        return body["stop_reason"]
    if path == "/v1/responses":
        return (body["incomplete_details"] or {"reason": "stop"})["reason"]
    return body["choices"][0]["finish_reason"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_spent_budget_is_told_in_the_protocols_shape(path: str, stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        budget = BudgetConfig(requests=2)
        async with served(FakeEngine(lambda _: LONG), chat, budget=budget) as up:
            body = {**BODIES[path], "stream": stream}
            for status in (200, 200, 429, 429):
                answer = await up.post(f"/s/a{path}", body)
                assert answer.status_code == status
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "2 requests" in error["message"]
            assert error.get("code", "session_budget_exceeded") == "session_budget_exceeded"
            assert "prompt is too long" not in answer.text
            assert len(await up.turns("a")) == 2
            assert (await up.post(f"/s/b{path}", body)).status_code == 200  # its own budget
            assert "forge_calls_over_budget_total 2" in (await up.http.get("/metrics")).text

    run(test)


def test_the_official_clients_do_not_try_again() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(lambda _: LONG), chat) as up:
            up.gateway.open("a", budget=BudgetConfig(tokens=1))
            await up.post("/s/a/v1/chat/completions", {"messages": USER})
            root = f"{up.url}/s/a"
            ask = {"model": "m", "messages": USER, "max_tokens": 9}
            async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k") as client:
                for create in (client.chat.completions.create, client.responses.create):
                    asked = ask if create == client.chat.completions.create else {"input": "hi"}
                    with pytest.raises(openai.RateLimitError) as caught:
                        await create(**asked)
                    assert caught.value.code == "session_budget_exceeded"
            async with anthropic.AsyncAnthropic(base_url=root, api_key="k") as client:
                with pytest.raises(anthropic.RateLimitError):
                    await client.messages.create(**ask)
            # One refusal each: nothing was sent again.
            assert "forge_calls_over_budget_total 3" in (await up.http.get("/metrics")).text
            assert up.gateway.over_budget("a")

    run(test)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_end_a_call_exactly(path: str, stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        budget = BudgetConfig(tokens=30)
        async with served(FakeEngine(lambda _: LONG), chat, budget=budget) as up:
            finishes = []
            for _ in range(2):
                body = {**BODIES[path], "stream": stream, "min_tokens": 15}
                answer = await up.post(f"/s/a{path}", body)
                assert answer.status_code == 200, answer.text
                if not stream:
                    finishes.append(finish_of(path, answer.json()))
            turns = await up.turns("a")
            assert [len(turn["output_ids"]) for turn in turns] == [len(LONG), 30 - len(LONG)]
            assert [turn["finish_reason"] for turn in turns] == ["stop", "length"]
            assert len(set(finishes)) == len(finishes)
            assert (await up.post(f"/s/a{path}", BODIES[path])).status_code == 429

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_calls_at_once_end_within_a_chunk_of_the_budget(n: int) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow(pause=0.001, tokens=100)
        async with served(engine, chat) as up:
            up.gateway.open("a", budget=BudgetConfig(tokens=50))
            body = {"messages": USER, "n": n}
            calls = [up.post("/s/a/v1/chat/completions", body) for _ in range(6 // n)]
            answers = await asyncio.gather(*calls)
            told = [c for a in answers if a.status_code == 200 for c in a.json()["choices"]]
            assert {choice["finish_reason"] for choice in told} == {"length"}
            assert engine.running == 0
            assert up.gateway.over_budget("a")
            turns = up.gateway.close("a")
            assert len(turns) == len(told)
            assert 50 <= sum(len(turn.output) for turn in turns) < 50 + 6

    run(test)


def test_time_ends_a_call_and_the_session() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow(pause=0.02, tokens=100_000)
        async with served(engine, chat) as up:
            up.gateway.open("a", budget=BudgetConfig(seconds=0.3))
            answer = await up.post("/s/a/v1/chat/completions", {"messages": USER})
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert (
                await up.post("/s/a/v1/chat/completions", {"messages": USER})
            ).status_code == 429
            [turn] = up.gateway.close("a")
            assert turn.finish == "length"

    run(test)


def test_without_limits_nothing_is_over_budget() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(lambda _: LONG), chat) as up:
            up.gateway.open("a")
            await up.post("/s/a/v1/chat/completions", {"messages": USER, "max_tokens": 3})
            assert not up.gateway.over_budget("a")
            with pytest.raises(KeyError):
                up.gateway.over_budget("b")

    run(test)


@pytest.mark.parametrize("name", ["requests", "tokens", "seconds"])
def test_a_budget_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"budget.{name}=0 must be positive"):
        BudgetConfig(**{name: 0})


@pytest.mark.parametrize("wrong", [{"top_p": 2}, {"min_tokens": 9, "max_tokens": 3}])
def test_malformed_calls_are_not_counted(wrong: dict) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        budget = BudgetConfig(requests=2)
        async with served(FakeEngine(lambda _: LONG), chat, budget=budget) as up:
            path, body = "/s/a/v1/chat/completions", {"messages": USER}
            asked = [body, {**body, **wrong}, body, body]
            statuses = [(await up.post(path, one)).status_code for one in asked]
            assert statuses == [200, 400, 200, 429]

    run(test)
