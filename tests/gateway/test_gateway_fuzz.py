"""Bodies as real clients write them, spoiled, and replies of any kind: no fault, no call left over.

Each session is a talk that goes on from what was really answered, so that spoiled histories
meet recorded replies.
"""

import asyncio
import copy
import dataclasses
import json
import random
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Served, chat_of, run, served, until
from test_gateway_errors import spoil

from forge_jax.models.chat import TOOL_FORMATS
from forge_jax.types import Request

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "d", "parameters": SCHEMA}
SPACE = {"type": "namespace", "name": "ns", "tools": [{"type": "function", **FUNCTION}]}
TOKENS = {"seed": 1, "return_token_ids": True}
# As OpenCode, pydantic-ai and others; Claude Code; Codex write them.
CHAT: dict[str, Any] = {
    "model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "be"}]}],
    "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "n": 2,
    "stream_options": {"include_usage": True}, "max_tokens": 60, "parallel_tool_calls": True,
    "reasoning_effort": "low", "logprobs": True, "top_logprobs": 1, "stop": ["</code>"], **TOKENS,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m", "system": [{"type": "text", "text": "x-anthropic-billing-header: a\nbe",
                              "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "go"}, {"role": "system", "content": "also"}],
    "tools": [{"name": "look", "input_schema": SCHEMA}, {"type": "web_search_20250305"}],
    "max_tokens": 60, "thinking": {"type": "adaptive"}, "context_management": {"edits": []},
    "output_config": {"effort": "low"}, "metadata": {"user_id": "{}"}, **TOKENS,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "m", "instructions": None, "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be"}]},
    ],
    "tools": [{"type": "function", **FUNCTION, "strict": False}, SPACE, {"type": "web_search"}],
    "tool_choice": "auto", "store": True, "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "reasoning": {"effort": "low"},
    "text": {"verbosity": "low"}, "max_output_tokens": 60, **TOKENS,
}  # fmt: skip
WIRES = {
    "/v1/chat/completions": (CHAT, "messages"),
    "/v1/messages": (MESSAGES, "messages"),
    "/v1/responses": (RESPONSES, "input"),
}
PARTS = [
    "<tool_call>", "</tool_call>", '{"name": "look", "arguments": {"key": "a"}}', "<function=look>",
    "</function>", "<parameter=key>", "</parameter>", "<minimax:tool_call>", '<invoke name="look">',
    "</invoke>", '<parameter name="n">7', "</minimax:tool_call>", "<|python_tag|>",
    '{"name": "look", "parameters": {"n": 1}}', "```json\n", "```", "[", "]", "?a\n", "<think>",
    "</think>", "text ", "\n", "é", "\x00", '{"a": NaN}', '"\\ud800"', "}" * 9, "{" * 99,
]  # fmt: skip


def said(path: str, answer: dict, rng: random.Random) -> list[dict]:
    """An answer as its client sends it back, with results of its calls."""
    if path == "/v1/responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "output": "42"}
        return [*answer["output"], *({**result, "call_id": call["call_id"]} for call in calls)]
    if path == "/v1/messages":
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "42"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        told = results or [{"type": "text", "text": "go on"}]
        reply = {"role": "assistant", "content": answer["content"]}
        return [reply, {"role": "user", "content": told}]
    message = rng.choice(answer["choices"])["message"]
    calls = message.get("tool_calls") or []
    return [
        message,
        *({"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls),
        {"role": "user", "content": "go on"},
    ]


def checked(path: str, answer: httpx.Response) -> None:
    """A refusal is one of the client's faults, in the protocol's shape."""
    assert answer.status_code in (400, 404), answer.text
    body = answer.json()
    assert body["error"]["message"]
    assert ("request_id" in body) == (path == "/v1/messages")


async def leave(up: Served, path: str, body: dict) -> None:
    """Asks for a stream and goes away in it."""
    async with up.http.stream("POST", path, json={**body, "stream": True}) as answer:
        async for _ in answer.aiter_raw():
            return


async def talk(up: Served, path: str, rng: random.Random, rounds: int) -> int:
    """Plays a session; gives how many completions were answered whole."""
    template, history = WIRES[path]
    session = f"/s/{path.strip('/').replace('/', '-')}{path}"
    body, whole = copy.deepcopy(template), 0
    for i in range(rounds):
        asked = {**copy.deepcopy(body), "seed": i}  # no body is another's retry
        for _ in range(rng.choice((0, 1, 1, 2))):
            spoil(asked, rng)
        raw = json.dumps({**asked, "stream": False})
        answer = await up.http.post(session, content=raw.encode("utf-8", "surrogatepass"))
        if answer.status_code != 200:
            checked(path, answer)
            continue
        told = answer.json()
        whole += len(told.get("choices", "x"))
        body[history] = [*body[history], *said(path, told, rng)][-12:]
        if rng.random() < 0.3:
            await leave(up, session, {**body, "seed": -i})
    return whole


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_spoiled_talks_leave_every_session_whole(form: str) -> None:
    rng = random.Random(form)

    def reply(_: Request) -> list[int]:
        text = "".join(rng.choices(PARTS, k=rng.randrange(8)))
        return [*text.encode("utf-8", "surrogatepass"), 258]

    async def test() -> None:
        chat = chat_of("chatml")
        reasoning = rng.choice(("none", "think"))
        form_of = dataclasses.replace(chat.format, tool_format=form, reasoning=reasoning)
        engine = FakeEngine(reply)
        async with served(engine, dataclasses.replace(chat, format=form_of)) as up:
            whole = await asyncio.gather(*(talk(up, path, rng, 14) for path in WIRES))
            assert min(whole) > 0
            await until(lambda: engine.running == 0)
            while "forge_calls_running 0" not in (await up.http.get("/metrics")).text:
                await asyncio.sleep(0.01)
            for path, answered in zip(WIRES, whole, strict=True):
                turns = await up.turns(path.strip("/").replace("/", "-"))
                ended = [turn for turn in turns if turn["finish_reason"] != "abort"]
                # Who left may have heard all there was; nobody else's call is there or missing.
                assert answered <= len(ended) <= len(turns)
                for turn in turns:
                    assert len(turn["output_ids"]) == len(turn["logprobs"])
                    assert turn["parent"] is None or turn["parent"] < len(turns)

    run(test)
