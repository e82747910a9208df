"""Who a call is from: names, precedence, nothing shared, limits, and no secret in a log."""

import dataclasses
import logging

import httpx
import pytest
from fake_engine import ADMIN, FakeEngine, Served, chat_of, run, served, text_engine

from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.identity import MOST_HEADERS, MOST_NAME
from forge_jax.models.tokenizer import ByteTokenizer

USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
BODIES = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    RESPONSES: {"input": "hi"},
    f"{MESSAGES}/count_tokens": {"messages": USER},
}
CLIENTS = ("httpx", "httpcore", "openai", "anthropic")  # that log what they send


def shaped(path: str, answer: httpx.Response) -> dict:
    """The error of a refusal, which has the shape of the path's protocol."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error", "request_id"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def test_the_path_beats_the_header_and_the_header_the_key() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            header, key = {"x-forge-session": "header"}, {"authorization": "Bearer key"}
            hint = {"x-session-id": "other", "session-id": "other"}
            for i, path in enumerate((CHAT, TEXT, MESSAGES, RESPONSES)):
                await up.post(f"/s/path{path}", BODIES[path], **header, **key, **hint)
                await up.post(path, BODIES[path], **header, **key, **hint)
                await up.post(path, BODIES[path], **key, **hint)
                await up.post(path, BODIES[path], **{"x-api-key": "key2"})
                for name in ("path", "header", "key", "key2"):
                    assert len(await up.turns(name)) == i + 1
            answer = await up.http.get("/sessions/other", headers={"x-api-key": ADMIN})
            assert answer.status_code == 404

    run(test)


def test_a_version_that_stands_twice_in_a_path_names_no_other_session() -> None:
    """Clients that add /v1 themselves may be given a base URL that has it."""

    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for path in (CHAT, MESSAGES, RESPONSES):
                assert (await up.post(f"/s/a/b/v1{path}", BODIES[path])).status_code == 200
            assert len(await up.turns("a/b")) == 3
            refused = await up.post(CHAT, BODIES[CHAT], **{"x-forge-session": "a/b/v1"})
            assert "ends in /v1" in shaped(CHAT, refused)["message"]

    run(test)


def test_nothing_of_a_session_is_read_by_another() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        call = '<tool_call>{"name": "f",         "arguments": {"a": 1}}</tool_call>'
        async with served(text_engine(chat, call), chat) as up:
            tools = [{"type": "function", "function": {"name": "f"}}]
            own = await up.post(f"/s/a{CHAT}", {"messages": USER, "tools": tools})
            stored = (await up.post(f"/s/a{RESPONSES}", BODIES[RESPONSES])).json()
            message = own.json()["choices"][0]["message"]
            assert "tool_calls" in message
            again = {"messages": [*USER, message, {"role": "user", "content": "more"}]}
            sampled = (await up.turns("a"))[0]["output_ids"]
            for name, known in (("a", True), ("b", False)):
                await up.post(f"/s/{name}{CHAT}", {**again, "tools": tools})
                prompt = (await up.turns(name))[-1]["prompt_ids"]
                # The odd white space of what was sampled comes back in its own session alone.
                spliced = any(prompt[i : i + len(sampled)] == sampled for i in range(len(prompt)))
                assert spliced is known
            calls = [{"type": "tool_use", "id": c["id"], "name": "f", "input": {"a": 1}}
                     for c in message["tool_calls"]]  # fmt: skip
            count = {"messages": [*USER, {"role": "assistant", "content": calls}, *USER]}
            counts = [
                (await up.post(f"/s/{name}{MESSAGES}/count_tokens", count)).json()["input_tokens"]
                for name in ("a", "c")
            ]
            assert counts[0] > counts[1]
            for method, path in [
                ("GET", stored["id"]), ("GET", f"{stored['id']}/input_items"),
                ("DELETE", stored["id"]),
            ]:  # fmt: skip
                answer = await up.http.request(method, f"/s/b{RESPONSES}/{path}")
                assert answer.status_code == 404
            for name, status in (("b", 404), ("a", 200)):
                more = {"input": "on", "previous_response_id": stored["id"]}
                assert (await up.post(f"/s/{name}{RESPONSES}", more)).status_code == status
            # Only the admin key opens the records, not the session's own name.
            assert (await up.http.get("/sessions/a")).status_code == 401
            wrong = await up.http.get("/sessions/a", headers={"x-api-key": "a"})
            assert wrong.status_code == 401

    run(test)


def test_names_and_headers_are_bounded() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for path, body in BODIES.items():
                for name in ("n" * (MOST_NAME + 1), "a\tb"):
                    answer = await up.post(path, body, **{"x-forge-session": name})
                    assert answer.status_code == 400
                    assert name not in shaped(path, answer)["message"]
                answer = await up.post(f"/s/a%00b{path}", body)
                assert answer.status_code == 400
                assert shaped(path, answer)
                answer = await up.post(path, body, **{"x-filler": "n" * MOST_HEADERS})
                assert answer.status_code == 431
                assert shaped(path, answer)
                name = "n" * MOST_NAME
                assert (await up.post(path, body, **{"x-api-key": name})).status_code == 200
            for name in ("", "a\nb"):
                with pytest.raises(ValueError, match="the session's name"):
                    up.gateway.open(name)

    run(test)


def test_a_fault_nobody_expected_is_told_in_the_protocols_shape() -> None:
    class Broken(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if "hi" in text:
                raise ZeroDivisionError("deep inside")
            return super().encode(text)

    async def test() -> None:
        chat = dataclasses.replace(chat_of("chatml"), tokenizer=Broken())
        async with served(FakeEngine(lambda _: [1]), chat) as up:
            for path, body in BODIES.items():
                answer = await up.post(path, body)
                assert answer.status_code == 500
                assert "deep" not in shaped(path, answer)["message"]

    run(test)


SECRET = "s3cret"


@pytest.mark.parametrize("fails", [False, True])
def test_no_secret_is_logged(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    def reply(_: object) -> list[int]:
        if fails:
            raise ZeroDivisionError("deep inside")
        return [*b"x", 258]

    async def drive(up: Served) -> None:
        for prefix in ("", f"/s/path-{SECRET}"):
            for path, body in BODIES.items():
                for stream in (False, True):
                    asked = {**body, "stream": stream}
                    for headers in (
                        {"x-forge-session": f"header-{SECRET}"},
                        {"authorization": f"Bearer key-{SECRET}"},
                        {"x-api-key": f"key-{SECRET}"},
                        {"x-api-key": f"key-{SECRET}" * MOST_NAME},
                    ):
                        await up.post(prefix + path, asked, **headers)
                await up.http.post(f"{prefix}{path}?key={SECRET}", content=b"{")
            for path in ("/v1/models", "/v1/models/x", "/v1/responses/x", "/v1/nothing"):
                await up.http.get(prefix + path, headers={"x-api-key": f"key-{SECRET}"})
        for key in (f"admin-{SECRET}", f"wrong-{SECRET}"):
            for path in (f"/sessions/path-{SECRET}", "/metrics", "/health", f"/{SECRET}"):
                await up.http.get(path, headers={"authorization": f"Bearer {key}"})

    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(reply), chat) as up:
            gateway = Gateway(FakeEngine(reply), chat, "tiny", f"admin-{SECRET}")
            gateway.open(f"path-{SECRET}")
            async with gateway.running() as url, httpx.AsyncClient(base_url=url) as http:
                await drive(dataclasses.replace(up, gateway=gateway, url=url, http=http))

    caplog.set_level(logging.DEBUG)
    run(test)
    ours = [r for r in caplog.records if not r.name.startswith(CLIENTS)]
    told = "\n".join(logging.Formatter().format(record) for record in ours)
    assert SECRET not in told
    assert ("deep inside" in told) is fails
