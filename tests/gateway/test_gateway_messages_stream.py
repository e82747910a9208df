"""Events of the Messages protocol as they are on the wire."""

import json

import anthropic
import pytest
from anthropic import AsyncAnthropic
from fake_engine import chat_of, run, served, slow, text_engine
from test_gateway_messages_wire import LOOK, PATH, USER


def events_of(text: str) -> list[dict]:
    """The data of server-sent events, each of which has its name twice."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_the_events_of_a_stream() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        call = '<tool_call>{"name": "look", "arguments": {"key": 1}}</tool_call>'
        async with served(text_engine(chat, f"Hm. {call}", chunk=2), chat) as up:
            body = {"messages": USER, "max_tokens": 999, "tools": [LOOK], "stream": True}
            answer = await up.post(PATH, body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = events_of(answer.text)
            start, *blocks, last, stop = events
            assert start["type"] == "message_start"
            assert start["message"]["usage"]["output_tokens"] == 0
            assert start["message"]["stop_reason"] is None
            assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
            assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
            assert last["usage"]["output_tokens"] > 10
            kinds = [(b["index"], b["type"].removeprefix("content_block_")) for b in blocks]
            ends = [(0, "start"), (0, "stop"), (1, "start"), (1, "delta"), (1, "stop")]
            assert [k for k in kinds if k != (0, "delta")] == ends
            assert kinds.index((0, "stop")) == kinds.index((1, "start")) - 1
            assert blocks[-2]["delta"] == {"type": "input_json_delta", "partial_json": '{"key":1}'}
            assert blocks[-3]["content_block"]["input"] == {}

    run(test)


def test_a_silent_stream_sends_pings() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(slow(pause=0.2, tokens=2), chat, keep_alive_seconds=0.03) as up:
            body = {"messages": USER, "max_tokens": 9, "stream": True}
            events = events_of((await up.post(PATH, body)).text)
            assert events.count({"type": "ping"}) > 2
            async with (
                AsyncAnthropic(base_url=up.url, api_key="key") as client,
                client.messages.stream(model="m", messages=USER, max_tokens=9) as stream,
            ):
                assert await stream.get_final_text() == "xx"

    run(test)


def test_a_stream_that_fails_ends_with_an_error() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(slow(), chat) as up:
            up.gateway.open("s")
            client = AsyncAnthropic(base_url=f"{up.url}/s/s", api_key="key", max_retries=0)

            async def read() -> None:
                async for event in await client.messages.create(
                    model="m", messages=USER, max_tokens=99, stream=True
                ):
                    if event.type == "content_block_delta":
                        up.gateway.close("s")

            with pytest.raises(anthropic.APIStatusError) as caught:
                await read()
            assert caught.value.body["error"]["message"] == "the session was closed"
            assert caught.value.body["request_id"].startswith("req_")
            await client.close()

    run(test)


def test_a_key_names_the_session_in_either_header() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            body = {"messages": USER, "max_tokens": 9}
            await up.post(PATH, body, **{"x-api-key": "me"})
            await up.post(f"{PATH}?beta=true", body, authorization="Bearer me")
            assert len(await up.turns("me")) == 2

    run(test)
