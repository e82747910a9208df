"""The Messages protocol below any client: what is read, events as they go out, errors."""

import copy
import json
import random
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from fake_engine import FakeEngine, chat_of, run, served, text_engine
from test_gateway_errors import spoil

from forge_jax.gateway.anthropic_conversation import NO_THREADS, read_conversation
from forge_jax.types import Refused

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"key": {}}}}
CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {"key": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}
FULL = {
    "model": "m",
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, CALL]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "go on"}]},
    ],
    "tools": [LOOK, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "max_tokens": 4, "stop_sequences": ["x"], "temperature": 1.0, "top_p": 0.5, "top_k": 3,
    "stream": False, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
}  # fmt: skip
FORM = {"type": "json_schema", "schema": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: list[tuple[dict, str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type='image'"),
    (
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].type='image'",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{**CALL, "input": "x"}]}]},
        "messages[0].content[0].input",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{**CALL, "name": None}]}]},
        "messages[0].content[0].name",
    ),
    ({"system": 3}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{}]}, "tools[0].name"),
    ({"tools": [{**LOOK, "input_schema": []}]}, "tools[0].input_schema"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [LOOK]}, "tool_choice.name"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": FORM}, "guided_regex": "a"},
        "output_config.format",
    ),
]


def checked(answer: httpx.Response) -> dict:
    """The error of a refused request, which has Anthropic's shape."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"]
    return body["error"]


def plain(**body: Any) -> list[tuple]:
    """The conversation of a body as role, text and calls."""
    read = read_conversation({"messages": USER, **body}).messages
    return [(m.role, m.content, *((c.id, c.name, c.arguments) for c in m.calls)) for m in read]


def test_messages_become_what_templates_read() -> None:
    assert plain(system="be") == [("system", "be"), ("user", "hi")]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    texts = [{"type": "text", "text": t} for t in ("be", "brief")]
    assert plain(system=[billing, *texts]) == [("system", "be\nbrief"), ("user", "hi")]
    joined = f"{billing['text']}\nbe\nbrief"
    assert plain(system=joined) == plain(system=texts)
    assert plain(system=[billing]) == plain(system=[]) == [("user", "hi")]
    inside = {"role": "system", "content": texts}
    assert plain(messages=[*USER, inside]) == [("user", "hi"), ("system", "be\nbrief")]
    thought = [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": "d"}]
    reply = {"role": "assistant", "content": [*thought, *texts, CALL, {"type": "server_tool_use"}]}
    results = [
        RESULT,
        {"type": "text", "text": "and"},
        *texts,
        {"type": "tool_result", "tool_use_id": "d", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "e"},
    ]
    assert plain(messages=[reply, {"role": "user", "content": results}]) == [
        ("assistant", "bebrief", ("c", "look", '{"key":1}')),
        ("tool", "1"),
        ("user", "and\nbe\nbrief"),
        ("tool", "Error: no"),
        ("tool", ""),
    ]
    for content in (None, [], ""):
        assert plain(messages=[{"role": "user", "content": content}]) == [("user", "")]
        assert plain(messages=[{"role": "assistant", "content": content}]) == [("assistant", "")]
    read = read_conversation({"messages": [{"role": "user", "content": results}]}).messages
    assert [m.extra.get("tool_call_id") for m in read] == ["c", None, "d", "e"]


def test_a_wrong_field_is_named() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for change, field in WRONG:
                answer = await up.post(PATH, {"messages": USER, "max_tokens": 9, **change})
                error = checked(answer)
                assert answer.status_code == 400
                assert error["message"].startswith(field)
                assert error["type"] == "invalid_request_error"

    run(test)


def test_a_thread_is_refused_so_that_clients_send_the_whole_talk() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for path in (PATH, f"{PATH}/count_tokens"):
                answer = await up.post(path, {"messages": USER, "thread": {"type": "create"}})
                details = answer.json()["error"]["details"]
                assert (answer.status_code, details["error_code"]) == (400, NO_THREADS)
            assert (await up.post(PATH, {"messages": USER, "thread": None})).status_code == 200

    run(test)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": ' + b"[" * 100_000])
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for path in (PATH, f"{PATH}/count_tokens", f"/s/a{PATH}?beta=true"):
                answer = await up.http.post(path, content=raw)
                assert answer.status_code == 400
                assert checked(answer)["type"] == "invalid_request_error"

    run(test)


def test_no_body_makes_the_server_fail() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        rng = random.Random(0)
        async with served(text_engine(chat, "x"), chat) as up:
            seen = set()
            for _ in range(300):
                body = copy.deepcopy(FULL)
                for _ in range(rng.randrange(1, 4)):
                    spoil(body, rng)
                path = rng.choice([PATH, f"{PATH}/count_tokens"])
                answer = await up.http.post(path, content=json.dumps(body).encode())
                seen.add(answer.status_code)
                if answer.status_code != 200:
                    assert checked(answer), body
                    assert answer.status_code == 400, body
            assert seen == {200, 400}

    run(test)


def test_routes_and_methods_nobody_serves() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, undeclared=False) as up:
            for method, path, status in [
                ("GET", PATH, 405),
                ("POST", f"{PATH}/batches", 404),
                ("GET", f"/s/a{PATH}/batches/b", 404),
            ]:
                answer = await up.http.request(method, path)
                assert answer.status_code == status
                assert checked(answer)
            for path in (PATH, f"{PATH}/count_tokens"):
                answer = await up.post(f"/s/closed{path}", FULL)
                assert answer.status_code == 404
                assert checked(answer)["type"] == "not_found_error"
            # Paths of other protocols keep their own shape.
            answer = await up.post("/s/v1/messages/x/v1/chat/completions", {"messages": []})
            assert "param" in answer.json()["error"]

    run(test)


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
        (529, "overloaded_error", anthropic.InternalServerError),
        (400, "invalid_request_error", anthropic.BadRequestError),
    ],
)
def test_what_the_engine_refuses(status: int, kind: str, raised: type[Exception]) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        code = "context_length_exceeded" if status == 400 else None
        engine = FakeEngine(lambda _: Refused(status, "why", code=code))
        async with served(engine, chat) as up:
            client = AsyncAnthropic(base_url=up.url, api_key="key", max_retries=0)
            for stream in (False, True):
                body = {"messages": USER, "max_tokens": 9, "stream": stream}
                answer = await up.post(PATH, body)
                assert answer.status_code == status
                error = checked(answer)
                assert error["type"] == kind
                assert error["message"].startswith("prompt is too long" if code else "why")
                assert ("retry-after" in answer.headers) == (status in (429, 503, 529))
                with pytest.raises(raised) as caught:
                    await client.messages.create(model="m", **body)
                assert caught.value.status_code == status
                assert caught.value.request_id.startswith("req_")
            await client.close()

    run(test)


def test_a_body_too_large() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, max_body_bytes=1000) as up:
            for path in (PATH, f"{PATH}/count_tokens"):
                answer = await up.http.post(path, content=b"x" * 1001)
                assert answer.status_code == 413
                assert checked(answer)["type"] == "request_too_large"

    run(test)
