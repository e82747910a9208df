"""Bad requests: the right status, OpenAI's error shape, the field named, and never a 500."""

import copy
import json
import random

import httpx
import pytest
from fake_engine import LOOK, chat_of, run, served, text_engine

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FULL = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [LOOK],
    "tool_choice": "auto",
    "n": 1, "seed": 1, "stop": ["x"], "max_tokens": 4, "max_completion_tokens": 4,
    "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "stream": False,
    "stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "chat_template_kwargs": {"enable_thinking": False}, "stop_token_ids": [3], "top_p": 0.5,
}  # fmt: skip
TEXT = {"model": "m", "prompt": [1, 2], "max_tokens": 4, "logprobs": 1, "n": 1, "seed": 2}
ODD = [
    None, True, False, 0, -1, 1.5, 10**400, float("nan"), float("inf"), -(2**63), "", "x", "\ud800",
    "\x00", [], [[]], [None], {}, {"a": 1}, [1, "a"], "é" * 3, ["x"] * 20, {"type": "function"},
    {"role": "user"}, {"type": "image_url"},
]  # fmt: skip

WRONG: list[tuple[dict, str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tools": {}}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
    ),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"top_logprobs": 30}, "top_logprobs"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"response_format": "json"}, "response_format"),
    ({"messages": USER * 20_001}, "messages"),
    ({"tools": [LOOK] * 2_001}, "tools"),
]


def checked(answer: httpx.Response) -> dict:
    """The error of a refused request, which has OpenAI's shape."""
    assert 400 <= answer.status_code < 500
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_a_wrong_field_is_named() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for change, param in WRONG:
                answer = await up.post("/v1/chat/completions", {"messages": USER, **change})
                error = checked(answer)
                assert answer.status_code == 400
                assert error["param"] == param
                assert param in error["message"]
                assert error["type"] == "invalid_request_error"

    run(test)


def test_what_nobody_knows_is_tolerated() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            body = {
                "messages": [
                    {"role": "developer", "content": "d", "cache_control": {}},
                    {"role": "moderator", "content": None},
                    {"role": "tool", "id": "no tool_call_id", "extra": 1, "content": ["a", "b"]},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ],
                "tools": [{"type": "web_search"}, {**LOOK, "cache_control": {"type": "x"}}],
                "reasoning_effort": "high", "metadata": {"a": 1}, "store": False, "user": "u",
                "parallel_tool_calls": True,
            }  # fmt: skip
            assert (await up.post("/v1/chat/completions", body)).status_code == 200

    run(test)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"messages": ' + b"[" * 100_000, b"{}" * 2,
        b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}',
    ],
    ids=[
        "empty", "open", "list", "number", "text", "bytes", "deep", "two", "nan", "infinity",
        "beyond floats",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for path in ("/v1/chat/completions", "/v1/completions"):
                answer = await up.http.post(path, content=raw)
                assert checked(answer)
                assert answer.status_code == 400

    run(test)


@pytest.mark.parametrize("form", ["chatml", "lookup"])
def test_no_body_makes_the_server_fail(form: str) -> None:
    """Valid bodies with odd values at random places, and bytes lost."""

    async def test() -> None:
        chat = chat_of(form)
        rng = random.Random(form)
        async with served(text_engine(chat, "x"), chat) as up:
            seen = set()
            for i in range(400):
                path, body = rng.choice([("/v1/chat/completions", FULL), ("/v1/completions", TEXT)])
                body = copy.deepcopy(body)
                for _ in range(rng.randrange(1, 4)):
                    spoil(body, rng)
                raw = json.dumps(body).encode()
                if i % 10 == 0:
                    at = rng.randrange(len(raw))
                    raw = raw[:at] + raw[at + rng.randrange(1, 5) :]
                answer = await up.http.post(path, content=raw)
                seen.add(answer.status_code)
                if answer.status_code != 200:
                    assert checked(answer), raw
                    assert answer.status_code == 400, raw
            assert seen == {200, 400}

    run(test)


def spoil(value: object, rng: random.Random) -> None:
    """Puts something odd somewhere into a body."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = rng.choice(list(keys))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            value = inner
            continue
        if isinstance(value, dict) and rng.random() < 0.2:
            del value[key]
        else:
            value[key] = copy.deepcopy(rng.choice(ODD))
        return


def test_routes_and_methods_nobody_serves() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for method, path, status in [
                ("GET", "/", 404),
                ("HEAD", "/", 404),
                ("POST", "/v1/embeddings", 404),
                ("POST", "/v1/nothing", 404),
                ("POST", "/s/a/v1/nothing", 404),
                ("GET", "/v1/chat/completions", 405),
                ("GET", "/v1/models/gpt-4", 404),
            ]:
                answer = await up.http.request(method, path)
                assert answer.status_code == status, path
                if method != "HEAD":
                    assert checked(answer)

    run(test)


def test_a_body_too_large_is_refused_and_the_connection_lives() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, max_body_bytes=1000) as up:
            for size in (1001, 3000, 100_000):
                answer = await up.http.post("/v1/chat/completions", content=b"x" * size)
                assert answer.status_code == 413
                assert checked(answer)
            body = json.dumps({"messages": USER}).encode()
            answer = await up.http.post("/v1/chat/completions", content=body.ljust(1000))
            assert answer.status_code == 200

    run(test)


def test_a_template_that_refuses() -> None:
    async def test() -> None:
        chat = chat_of("lookup")
        async with served(text_engine(chat, "x"), chat) as up:
            broken = {"id": "c", "function": {"name": "look", "arguments": "no object"}}
            for messages in (
                [{"role": "assistant", "tool_calls": [broken]}],
                [{"role": "user", "content": ""}],  # a prompt without tokens
            ):
                answer = await up.post("/v1/chat/completions", {"messages": messages})
                assert checked(answer)

    run(test)
