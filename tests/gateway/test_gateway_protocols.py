"""Chat Completions and Completions through the official client, streamed and not."""

import json
from collections import defaultdict

import numpy as np
import pytest
from fake_engine import LOOK, FakeEngine, chat_of, run, served, text_engine

from forge_jax.models.chat import Chat
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Request

CALL = '<tool_call>\n{"name": "{tool}", "arguments": {arguments}}\n</tool_call>'
USER = [{"role": "user", "content": "What is k1?"}]
TOLD = {"return_token_ids": True}


def scripted(chat: Chat, *rules: Rule) -> ScriptedEngine:
    return ScriptedEngine(rules, chat.tokenizer, stop_id=chat.stop_ids[0])


def two_steps(chat: Chat, chunks: int = 1) -> ScriptedEngine:
    return scripted(
        chat,
        Rule(when=When(tool_result=True), text="It is 42.", chunks=chunks),
        Rule(when=When(tools=True), text=f"Let me look.\n{CALL}", chunks=chunks),
        Rule(text="No tools."),
    )


def by_seed(request: Request) -> list[int]:
    """Sixteen letters that depend on what may decide them, and on nothing else."""
    words = [request.sampling.seed or 0, request.sampling.choice, len(request.prompt)]
    return [*np.random.default_rng(words).integers(97, 123, 16).tolist(), 258]


async def streamed(stream) -> dict[int, dict]:
    """What a client puts together from a stream, by choice."""
    choices: dict[int, dict] = defaultdict(lambda: {"content": "", "calls": {}, "ids": []})
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            seen = choices[choice.index]
            assert "finish" not in seen
            seen["content"] += choice.delta.content or ""
            seen["role"] = choice.delta.role or seen["role"]
            seen["ids"] += getattr(choice, "token_ids", [])
            for call in choice.delta.tool_calls or []:
                known = seen["calls"].setdefault(call.index, {"arguments": ""})
                known["arguments"] += call.function.arguments or ""
                if call.id:
                    known |= {"id": call.id, "name": call.function.name, "type": call.type}
            if choice.finish_reason:
                seen["finish"] = choice.finish_reason
    return choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_of_two_steps(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(two_steps(chat, chunks=7 if stream else 1), chat) as up:
            client = up.of("s")
            if stream:
                async with client.chat.completions.stream(
                    model="any", messages=USER, tools=[LOOK]
                ) as events:
                    first = await events.get_final_completion()
            else:
                first = await client.chat.completions.create(
                    model="any", messages=USER, tools=[LOOK]
                )
            reply = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert (reply.role, reply.content) == ("assistant", "Let me look.")
            (call,) = reply.tool_calls
            assert call.function.name == "look"
            assert isinstance(json.loads(call.function.arguments), dict)
            result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
            messages = [*USER, reply.model_dump(exclude_none=True), result]
            second = await client.chat.completions.create(
                model="any", messages=messages, tools=[LOOK]
            )
            assert second.choices[0].message.content == "It is 42."
            assert second.choices[0].finish_reason == "stop"
            assert [t["parent"] for t in await up.turns("s")] == [None, 0]

    run(test)


def test_stream_and_answer_say_the_same() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        text = f"é Two: {CALL}\n and {CALL} <tool_call>oops</tool_call> 🦉"
        engine = scripted(chat, Rule(text=text, chunks=31))
        async with served(engine, chat) as up:
            ask = {"model": "m", "messages": USER, "tools": [LOOK], "extra_body": TOLD}
            answer = await up.client.chat.completions.create(**ask)
            told = await streamed(await up.client.chat.completions.create(**ask, stream=True))
        (whole,), piece = answer.choices, told[0]
        assert piece["content"] == whole.message.content
        assert "oops" in whole.message.content
        assert piece["finish"] == whole.finish_reason == "tool_calls"
        assert piece["ids"] == whole.token_ids == [*chat.tokenizer.encode(engine_text(text)), 258]
        calls = [
            {"arguments": c.function.arguments, "id": c.id, "name": c.function.name, "type": c.type}
            for c in whole.message.tool_calls
        ]
        assert len(calls) == 2
        told_calls = [piece["calls"][i] for i in range(2)]
        assert [c | {"id": ""} for c in calls] == [c | {"id": ""} for c in told_calls]
        ids = [c["id"] for c in calls + told_calls]
        assert len(set(ids)) == 4
        for name in ids:
            assert len(name) <= 40
            assert name.replace("_", "").replace("-", "").isalnum()

    run(test)


def engine_text(text: str) -> str:
    return text.replace("{tool}", "look").replace("{arguments}", "{}")


def test_usage_ends_a_stream_only_where_it_was_asked_for() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "words"), chat) as up:
            for wire, ask in (
                (up.client.chat.completions, {"messages": USER}),
                (up.client.completions, {"prompt": "x"}),
            ):
                for wanted in (True, False):
                    stream = await wire.create(
                        model="m", **ask, stream=True, n=2,
                        stream_options={"include_usage": wanted},
                    )  # fmt: skip
                    chunks = [chunk async for chunk in stream]
                    assert [c.usage is not None for c in chunks[:-1]] == [False] * (len(chunks) - 1)
                    assert (chunks[-1].usage is not None) == wanted
                    assert bool(chunks[-1].choices) != wanted
                    if wanted:
                        usage = chunks[-1].usage
                        assert usage.completion_tokens == 12
                        assert usage.total_tokens == usage.prompt_tokens + 12
                        assert usage.prompt_tokens_details.cached_tokens == 1

    run(test)


@pytest.mark.parametrize("wire", ["chat", "text"])
def test_a_seed_repeats_and_choices_differ(wire: str) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(by_seed), chat) as up:

            async def texts(seed: int | None, n: int) -> list[str]:
                if wire == "text":
                    answer = await up.client.completions.create(
                        model="m", prompt="p", seed=seed, n=n, max_tokens=64
                    )
                    return [choice.text for choice in answer.choices]
                chat_answer = await up.client.chat.completions.create(
                    model="m", messages=USER, seed=seed, n=n
                )
                return [choice.message.content for choice in chat_answer.choices]

            first = await texts(7, 4)
            assert len(set(first)) == 4
            assert await texts(7, 4) == first
            assert await texts(7, 1) == first[:1]
            assert not set(await texts(8, 4)) & set(first)
            assert (await texts(2**64 - 1, 1)) == (await texts(2**64 - 1, 1))

    run(test)


def test_log_probs_are_the_samplers() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "aé"), chat) as up:
            answer = await up.client.chat.completions.create(
                model="m", messages=USER, logprobs=True, top_logprobs=3
            )
            content = answer.choices[0].logprobs.content
            assert [t.logprob for t in content] == [0.0, -0.125, -0.25, -0.375]
            assert bytes(b for t in content for b in t.bytes) == "aé<|im_end|>".encode()
            assert [t.top_logprobs[0].token for t in content] == [t.token for t in content]
            stream = await up.client.chat.completions.create(
                model="m", messages=USER, logprobs=True, stream=True
            )
            told = [c.choices[0].logprobs async for c in stream]
            assert [t.logprob for p in told if p for t in p.content] == [t.logprob for t in content]

    run(test)


@pytest.mark.parametrize(
    "prompt", ["k1 é", [107, 49, 32, 195, 169], ["k1 é"], [[107, 49, 32, 195, 169]]]
)
def test_completions_tell_tokens_as_they_were(prompt: object) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "one two"), chat) as up:
            ask = {"model": "m", "prompt": prompt, "logprobs": 1, "extra_body": TOLD}
            answer = await up.client.completions.create(**ask)
            (choice,) = answer.choices
            assert choice.text == "one two"
            assert choice.finish_reason == "stop"
            assert choice.prompt_token_ids == [107, 49, 32, 195, 169]
            assert choice.token_ids == [*b"one two", 258]
            assert choice.weight_versions == [7] * 8
            assert choice.logprobs.token_logprobs == [-i / 8 for i in range(8)]
            assert choice.logprobs.tokens == [*"one two", "<|im_end|>"]
            assert choice.logprobs.text_offset == list(range(8))
            assert answer.usage.completion_tokens == 8
            stream = await up.client.completions.create(**ask, stream=True)
            chunks = [c.choices[0] async for c in stream]
            assert "".join(c.text for c in chunks) == "one two"
            assert [i for c in chunks for i in c.token_ids] == choice.token_ids
            assert [o for c in chunks for o in c.logprobs.text_offset] == list(range(8))
            assert chunks[0].prompt_token_ids == choice.prompt_token_ids

    run(test)


def test_what_a_request_says_of_sampling_reaches_the_engine() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "ab")
        async with served(engine, chat) as up:
            create = up.client.completions.create
            answer = await create(
                model="m", prompt="x", temperature=0, stop=["q"], seed=-5, max_tokens=9,
                extra_body={"ignore_eos": True, "stop_token_ids": [65]},
            )  # fmt: skip
            # Ends of turns that do not end the completion are text like any other.
            assert answer.choices[0].text == "ab<|im_end|>"
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0, -5, 9)
            assert (sampling.stop, sampling.stop_ids) == (("q",), (258, 65))
            assert sampling.ignore_eos
            await create(model="m", prompt="x")
            assert engine.requests[-1].sampling.max_tokens == 16
            chat_create = up.client.chat.completions.create
            await chat_create(model="m", messages=USER)
            assert engine.requests[-1].sampling.max_tokens is None
            assert engine.requests[-1].sampling.temperature == 1.0
            await chat_create(model="m", messages=USER, max_tokens=5, max_completion_tokens=3)
            assert engine.requests[-1].sampling.max_tokens == 3

    run(test)


def test_facts_tell_a_script_what_the_request_was() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "x")
        async with served(engine, chat) as up:
            create = up.of("s").chat.completions.create
            await create(model="m", messages=USER, tools=[LOOK])
            schema = {"type": "object", "properties": {"a": {"type": "string"}}}
            wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            await create(model="m", messages=USER, response_format=wanted)
            result = {"role": "tool", "tool_call_id": "t", "content": "r"}
            await create(model="m", messages=[*USER, result], tools=[LOOK], tool_choice="none")
            facts = [r.facts for r in engine.requests]
            assert [f.call for f in facts] == [0, 1, 2]
            assert [len(f.tools) for f in facts] == [1, 0, 0]
            assert [f.tool_result for f in facts] == [False, False, True]
            assert [f.json_schema for f in facts] == [None, schema, None]
            assert "What is k1?" in facts[0].text

    run(test)


def test_lookup_format_through_the_client() -> None:
    async def test() -> None:
        chat = chat_of("lookup")
        async with served(text_engine(chat, "?k7", "!3"), chat) as up:
            create = up.of("s").chat.completions.create
            first = (await create(model="m", messages=USER, tools=[LOOK])).choices[0]
            (call,) = first.message.tool_calls
            assert first.message.content is None
            assert json.loads(call.function.arguments) == {"key": "k7"}
            talk = [
                *USER,
                first.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "k9"},
            ]
            second = (await create(model="m", messages=talk, tools=[LOOK])).choices[0]
            assert (second.message.content, second.finish_reason) == ("!3", "stop")
            turns = await up.turns("s")
            assert bytes(turns[1]["prompt_ids"]) == b"What is k1?\n?k7\n=k9\n"
            assert bytes(turns[1]["output_ids"]) == b"!3\n"

    run(test)
