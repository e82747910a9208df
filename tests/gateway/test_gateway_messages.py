"""Anthropic's Messages protocol through the official client, streamed and not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from fake_engine import ADMIN, Served, chat_of, run, served, text_engine

from forge_jax.models.chat import Chat
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Engine

CALL = '<tool_call>\n{"name": "{tool}", "arguments": {arguments}}\n</tool_call>'
KEY = {"type": "object", "properties": {"key": {"type": "string"}}}
LOOK = {"name": "look", "description": "Looks a key up", "input_schema": KEY}
USER = [{"role": "user", "content": "What is k1?"}]
ASK = {"model": "any", "max_tokens": 4096, "messages": USER}
MARK = {"type": "ephemeral"}


def scripted(chat: Chat, *rules: Rule) -> ScriptedEngine:
    return ScriptedEngine(rules, chat.tokenizer, stop_id=chat.stop_ids[0])


def two_steps(chat: Chat, chunks: int = 1) -> ScriptedEngine:
    return scripted(
        chat,
        Rule(when=When(tool_result=True), text="It is 42.", chunks=chunks),
        Rule(when=When(tools=True), text=f"Let me look.\n{CALL}", chunks=chunks),
        Rule(text="No tools."),
    )


@asynccontextmanager
async def official(
    engine: Engine, chat: Chat, session: str = "s", **config: object
) -> AsyncIterator[tuple[Served, AsyncAnthropic]]:
    async with (
        served(engine, chat, **config) as up,
        AsyncAnthropic(base_url=f"{up.url}/s/{session}", api_key="key", max_retries=0) as client,
    ):
        yield up, client


async def say(client: AsyncAnthropic, way: str, **ask: object) -> Message:
    if way == "whole":
        return await client.messages.create(**ask)
    if way == "beta":  # is sent to ?beta=true
        return await client.beta.messages.create(**ask, betas=["interleaved-thinking-2025-05-14"])
    if way == "sync":

        def call() -> Message:
            with Anthropic(base_url=str(client.base_url), auth_token="k", max_retries=0) as plain:
                return plain.messages.create(**ask)

        return await asyncio.to_thread(call)
    async with client.messages.stream(**ask) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("way", ["whole", "streamed", "sync", "beta"])
def test_a_task_of_two_steps(way: str) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = two_steps(chat, chunks=7)
        async with official(engine, chat) as (up, client):
            first = await say(client, way, **ASK, system="Be brief.", tools=[LOOK])
            text, call = first.content
            assert (text.type, text.text) == ("text", "Let me look.")
            assert (call.type, call.name) == ("tool_use", "look")
            assert isinstance(call.input, dict)
            assert (first.role, first.type, first.stop_reason) == (
                "assistant",
                "message",
                "tool_use",
            )
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
            talk = [
                *USER,
                {"role": "assistant", "content": first.model_dump(exclude_none=True)["content"]},
                {"role": "user", "content": [result]},
            ]
            second = await say(
                client, way, **{**ASK, "messages": talk}, system="Be brief.", tools=[LOOK]
            )
            assert [block.text for block in second.content] == ["It is 42."]
            assert second.stop_reason == "end_turn"
            turns = await up.turns("s")
            assert [turn["parent"] for turn in turns] == [None, 0]
            begin = turns[0]["prompt_ids"] + turns[0]["output_ids"]
            assert turns[1]["prompt_ids"][: len(begin)] == begin
            for turn, message in zip(turns, (first, second), strict=True):
                assert message.usage.input_tokens == len(turn["prompt_ids"])
                assert message.usage.output_tokens == len(turn["output_ids"])
            assert b"Be brief." in bytes(i for i in begin if i < 256)

    run(test)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_stream_tells_what_the_whole_answer_tells(chunk: int) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"key": "é", "n": [1.5]}}</tool_call>'
    text = f"é Two: {call}\n and {call} <tool_call>oops</tool_call> 🦉"

    async def test() -> None:
        chat = chat_of("chatml")
        async with official(text_engine(chat, text, chunk=chunk), chat) as (_, client):
            ask = {
                **ASK,
                "tools": [LOOK],
                "extra_body": {"return_token_ids": True, "logprobs": True},
            }
            whole = await client.messages.create(**ask)
            kinds = [block.type for block in whole.content]
            assert kinds == ["text", "tool_use", "text", "tool_use", "text"]
            assert "oops" in whole.content[-1].text
            assert whole.token_ids == [*chat.tokenizer.encode(text), 258]
            assert whole.weight_versions == [7] * len(whole.token_ids)
            assert len(whole.logprobs) == len(whole.token_ids)
            events = [event async for event in await client.messages.create(**ask, stream=True)]
            assert events[0].message.prompt_token_ids == whole.prompt_token_ids
            assert events[-2].token_ids == whole.token_ids
            assert events[-2].logprobs == whole.logprobs
            assert events[-2].delta.stop_reason == whole.stop_reason == "tool_use"
            async with client.messages.stream(**ask) as stream:
                streamed = await stream.get_final_message()
            plain = [[b.model_dump(exclude={"id"}) for b in m.content] for m in (whole, streamed)]
            for blocks in plain:
                for block in blocks:
                    block.pop("parsed_output", None)
            assert plain[0] == plain[1]
            assert whole.usage.model_dump() == streamed.usage.model_dump()
            ids = [b.id for m in (whole, streamed) for b in m.content if b.type == "tool_use"]
            assert len(set(ids)) == 4
            assert "token_ids" not in whole.content[0].model_dump()

    run(test)


def test_why_an_answer_ends() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = scripted(chat, Rule(text="one two three", chunks=5))
        async with official(engine, chat) as (_, client):
            for way in ("whole", "streamed"):
                told = []
                for more in ({}, {"max_tokens": 3}, {"stop_sequences": ["q", " th"]}):
                    message = await say(client, way, **{**ASK, **more})
                    told.append(
                        (message.content[0].text, message.stop_reason, message.stop_sequence)
                    )
                assert told == [
                    ("one two three", "end_turn", None),
                    ("one", "max_tokens", None),
                    ("one two", "stop_sequence", " th"),
                ]

    run(test)


def test_an_empty_answer_has_a_block_and_prompts_read_from_a_cache_are_told() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with official(text_engine(chat, ""), chat) as (up, client):
            for way in ("whole", "streamed"):
                message = await say(client, way, **ASK)
                assert [block.text for block in message.content] == [""]
                usage = message.usage
                assert (usage.output_tokens, usage.cache_read_input_tokens) == (1, 1)
                assert usage.cache_creation_input_tokens == 0
                prompt = (await up.turns("s"))[0]["prompt_ids"]
                assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)

    run(test)


def test_what_a_request_says_of_sampling_reaches_the_engine() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "ab")
        async with official(engine, chat) as (_, client):
            more = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "ignore_eos": True}
            answer = await client.messages.create(**ASK, stop_sequences=["q"], extra_body=more)
            assert answer.content[0].text == "ab<|im_end|>"
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
            assert (sampling.seed, sampling.stop, sampling.max_tokens) == (3, ("q",), 4096)
            schema = {"type": "object", "properties": {"a": {"type": "string"}}}
            form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
            await client.messages.create(**ASK, output_config=form)
            assert engine.requests[-1].facts.json_schema == schema

    run(test)


def test_which_tools_may_and_must_be_called() -> None:
    other = {"type": "custom", "name": "other", "input_schema": KEY, "cache_control": MARK}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}

    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "ab")
        async with official(engine, chat) as (_, client):

            async def asked(**choice: object) -> tuple[int, str]:
                more = {"tool_choice": choice} if choice else {}
                await client.messages.create(**ASK, tools=[hosted, LOOK, other], **more)
                request = engine.requests[-1]
                grammar = request.sampling.grammar
                return len(request.facts.tools), "" if grammar is None else grammar.text

            assert await asked() == await asked(type="auto") == (2, "")
            assert await asked(type="none") == (0, "")
            tools, grammar = await asked(type="any")
            assert tools == 2
            assert "tool_1" in grammar
            assert "call)*" in grammar
            tools, grammar = await asked(type="tool", name="other", disable_parallel_tool_use=True)
            assert tools == 2
            assert "tool_1" not in grammar
            assert "other" in grammar
            assert "call)*" not in grammar

    run(test)


def test_counting_tokens_changes_nothing() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with official(text_engine(chat, "x"), chat) as (up, client):
            ask = {"model": "any", "messages": USER, "system": "é", "tools": [LOOK]}
            counted = (await client.messages.count_tokens(**ask)).input_tokens
            assert (await client.beta.messages.count_tokens(**ask)).input_tokens == counted
            admin = {"authorization": f"Bearer {ADMIN}"}
            assert (await up.http.get("/sessions/s", headers=admin)).status_code == 404
            message = await client.messages.create(**ask, max_tokens=9)
            usage = message.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
            talk = [*USER, {"role": "assistant", "content": "x"}, *USER]
            counted = (await client.messages.count_tokens(**{**ask, "messages": talk})).input_tokens
            assert len(await up.turns("s")) == 1
            await client.messages.create(**{**ask, "messages": talk}, max_tokens=9)
            turns = await up.turns("s")
            assert len(turns[1]["prompt_ids"]) == counted
            assert turns[1]["parent"] == 0

    run(test)
