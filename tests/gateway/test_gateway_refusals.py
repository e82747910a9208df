"""Calls that no offered tool takes are counted, and who made a call is on its record."""

from typing import Any

import pytest
from fake_engine import chat_of, run, served, text_engine

from forge_jax.gateway.messages import ToolCall
from forge_jax.gateway.refusals import refused

KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("look", '{"key": "a"}', 0),
        ("look", '{"key": 1}', 1),
        ("look", "{}", 1),
        ("look", '{"key": ', 1),
        ("find", '{"key": "a"}', 1),
        ("free", '{"anything": []}', 0),
        ("wrong", '{"key": 1}', 0),  # the tool's own schema is none
        ("elsewhere", '{"key": 1}', 0),  # ... or cannot be had
        ("slow", '{"key": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}', 0),
    ],
)
def test_a_call_that_no_tool_takes_is_counted(name: str, arguments: str, count: int) -> None:
    slow = {"type": "object", "properties": {"key": {"pattern": "^(a+)+$"}}}
    elsewhere = {"$ref": "http://127.0.0.1:9/schema"}
    tools = [
        tool("look", KEY), tool("free", None), tool("wrong", {"type": "thing"}),
        tool("elsewhere", elsewhere), tool("slow", slow), {"type": "custom"},
    ]  # fmt: skip
    call = ToolCall(id="c", name=name, arguments=arguments)
    assert refused([call], tools) == count
    assert refused([call] * 2, []) == 2


def test_a_turn_says_which_agent_made_it_and_what_it_called() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        reply = '<tool_call>{"name": "find", "arguments": {"key": "a"}}</tool_call>'
        async with served(text_engine(chat, reply), chat) as up:
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("look", KEY)]}
            for headers in ({"x-forge-agent": "worker"}, {}):
                await up.http.post("/s/a/v1/chat/completions", json=body, headers=headers)
            turns = await up.turns("a")
            assert [turn["agent"] for turn in turns] == ["worker", ""]
            assert [turn["refused"] for turn in turns] == [1, 1]

    run(test)
