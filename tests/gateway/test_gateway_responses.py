"""OpenAI Responses through the official client, streamed and not."""

import itertools
import json

import pytest
from fake_engine import FakeEngine, Served, chat_of, run, served, text_engine
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from forge_jax.gateway.response_tools import shown_names
from forge_jax.models.chat import Chat
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks a key up",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "{tool}", "arguments": {arguments}}\n</tool_call>'
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"key":  "k1"}}\n</tool_call>'
EVENTS = TypeAdapter(ResponseStreamEvent)
LOGPROBS = "message.output_text.logprobs"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def result(call, text: str) -> dict:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def two_steps(chat: Chat, chunks: int = 1) -> ScriptedEngine:
    rules = (
        Rule(when=When(tool_result=True), text="It is 42.", chunks=chunks),
        Rule(when=When(tools=True), text=f"Let me  look.\n{CALL} So.", chunks=chunks),
        Rule(text="No tools."),
    )
    return ScriptedEngine(rules, chat.tokenizer, stop_id=chat.stop_ids[0])


async def continued(up: Served, session: str) -> list[dict]:
    """The turns of a session, each of which must go on exactly where the one before ended."""
    turns = await up.turns(session)
    assert [t["parent"] for t in turns] == [None, *range(len(turns) - 1)]
    for before, turn in itertools.pairwise(turns):
        whole = before["prompt_ids"] + before["output_ids"]
        assert turn["prompt_ids"][: len(whole)] == whole
        assert "abort" not in (before["finish_reason"], turn["finish_reason"])
    return turns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("history", ["items", "bare", "previous", "references", "interleaved"])
def test_a_task_of_two_steps(stream: bool, history: str) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(two_steps(chat, chunks=9 if stream else 1), chat) as up:
            client = up.of("s")

            async def ask(**fields):
                fields |= {"model": "any", "tools": [LOOK], "instructions": "Be brief."}
                if not stream:
                    return await client.responses.create(**fields)
                async with client.responses.stream(**fields) as events:
                    return await events.get_final_response()

            talk = [user("What is k1?")]
            first = await ask(input=talk)
            assert [item.type for item in first.output] == ["message", "function_call", "message"]
            call = first.output[1]
            assert (first.status, call.name) == ("completed", "look")
            assert isinstance(json.loads(call.arguments), dict)
            echoed = [item.to_dict() for item in first.output]
            after: dict = {}
            if history == "bare":  # neither ids nor parts
                (before, after_call) = [
                    {"role": "assistant", "content": first.output[i].content[0].text}
                    for i in (0, 2)
                ]
                echoed = [before, {k: v for k, v in echoed[1].items() if k != "id"}, after_call]
            elif history == "references":
                echoed = [{"type": "item_reference", "id": item["id"]} for item in echoed]
            elif history == "previous":
                talk, echoed, after = [], [], {"previous_response_id": first.id}
            talk += [*echoed, result(call, "42")]
            if history == "interleaved":  # the result stands before the rest of the reply
                talk = [*talk[:-2], talk[-1], talk[-2], user("So?")]
            second = await ask(input=talk, **after)
            turns = await continued(up, "s")
            assert len(turns) == 2
            assert [reply["rule"] for reply in turns[1]["replies"]] == ["call_id"]
            if history != "interleaved":
                assert second.output_text == "It is 42."
            assert second.usage.input_tokens == len(turns[1]["prompt_ids"])
            assert second.usage.output_tokens == len(turns[1]["output_ids"])

    run(test)


def test_events_are_numbered_and_say_what_the_answer_says() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        text = f"é One {WRITTEN}\n and {WRITTEN} <tool_call>oops</tool_call> 🦉"
        async with served(text_engine(chat, text, chunk=3), chat) as up:
            ask = {
                "model": "m", "input": "x", "tools": [LOOK], "include": [LOGPROBS],
                "extra_body": {"return_token_ids": True},
            }  # fmt: skip
            whole = await up.of("s").responses.create(**ask)
            events = [e async for e in await up.of("t").responses.create(**ask, stream=True)]
        for event in events:  # what the client itself does not check
            EVENTS.validate_python(event.to_dict())
        kinds = [e.type for e in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [e.sequence_number for e in events] == list(range(len(events)))
        last = events[-1].response
        assert {e.response.id for e in events if hasattr(e, "response")} == {last.id}
        assert last.token_ids == whole.token_ids == [*chat.tokenizer.encode(text), 258]
        assert last.prompt_token_ids == whole.prompt_token_ids
        assert last.weight_versions == [7] * len(last.token_ids)

        def said(items) -> list[tuple]:
            return [
                (i.type, i.status, i.content[0].text if i.type == "message" else i.arguments)
                for i in items
            ]

        assert said(last.output) == said(whole.output)
        assert [i.type for i in whole.output] == [
            "message", "function_call", "message", "function_call", "message",
        ]  # fmt: skip
        assert "oops" in whole.output[-1].content[0].text
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert said(done) == said(last.output)
        assert [i.id for i in done] == [i.id for i in last.output]
        words: dict[str, str] = {}
        for e in events:
            if e.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                words[e.item_id] = words.get(e.item_id, "") + e.delta
        assert list(words.values()) == [text for _, _, text in said(last.output)]
        assert len({i.id for i in (*whole.output, *last.output)}) == 10
        told = [t.logprob for t in whole.output[0].content[0].logprobs]
        assert told == [-i / 8 for i in range(len(whole.token_ids))]
        parts = [i.content[0].logprobs for i in done if i.type == "message"]
        assert [t.logprob for part in parts for t in part] == told

    run(test)


def test_a_response_that_is_cut_is_incomplete() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "many words"), chat) as up:
            ask = {"model": "m", "input": "x", "max_output_tokens": 4}
            whole = await up.client.responses.create(**ask)
            events = [e async for e in await up.client.responses.create(**ask, stream=True)]
            assert events[-1].type == "response.incomplete"
            for response in (whole, events[-1].response):
                assert response.status == response.output[0].status == "incomplete"
                assert response.incomplete_details.reason == "max_output_tokens"
                assert (response.output_text, response.usage.output_tokens) == ("many", 4)
                assert response.usage.input_tokens_details.cached_tokens == 1
                assert response.max_output_tokens == 4

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_reply_is_a_message_without_text(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(FakeEngine(lambda _: [258]), chat) as up:
            talk = [user("x")]
            for _ in range(2):
                if stream:
                    async with up.of("s").responses.stream(model="m", input=talk) as events:
                        response = await events.get_final_response()
                else:
                    response = await up.of("s").responses.create(model="m", input=talk)
                (item,) = response.output
                assert (item.role, item.content[0].text) == ("assistant", "")
                talk += [item.to_dict(), user("y")]
            await continued(up, "s")

    run(test)


def test_a_schema_is_followed_and_parsed() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = ScriptedEngine((Rule(text="{arguments}"),), chat.tokenizer, chat.stop_ids[0])
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        async with served(engine, chat) as up:
            create = up.client.responses.create
            answer = await create(model="m", input="x", text={"format": form})
            assert isinstance(json.loads(answer.output_text)["a"], str)
            assert answer.text.format.schema_ == schema
            await create(model="m", input="x", text={"format": {"type": "json_object"}})

    run(test)


def test_tools_of_every_kind_and_what_must_be_called() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        other = {**LOOK, "strict": None, "parameters": None}
        space = {"type": "namespace", "name": "crm", "description": "d",
                 "tools": [other, {**other, "name": "find"}, {"type": "custom"}]}  # fmt: skip
        tools = [{"type": "web_search"}, LOOK, {"type": "local_shell"}, space]
        assert shown_names([("crm", "look"), ("", "look")])["crm", "look"] == "crm__look"
        clash = [("crm", "look"), ("", "look"), ("", "crm__look"), ("", "crm__look_2")]
        assert shown_names(clash)["crm", "look"] == "crm__look_3"
        reply = '<tool_call>{"name": "crm__look", "arguments": {}}</tool_call>'
        engine = text_engine(chat, reply, "done")
        async with served(engine, chat) as up:

            async def names(**fields) -> list[str]:
                await up.client.responses.create(model="m", input="x", tools=tools, **fields)
                return [t["function"]["name"] for t in engine.requests[-1].facts.tools]

            first = await up.of("s").responses.create(model="m", input="x", tools=tools)
            assert [t["function"] for t in engine.requests[-1].facts.tools] == [
                {k: LOOK[k] for k in ("name", "description", "parameters")},
                {"name": "crm__look", "description": "Looks a key up"},
                {"name": "find", "description": "Looks a key up"},
            ]
            (call,) = first.output
            assert (call.namespace, call.name) == ("crm", "look")
            assert [t.type for t in first.tools] == ["function", "namespace"]
            talk = [user("x"), call.to_dict(), result(call, "r")]
            await up.of("s").responses.create(model="m", input=talk, tools=tools)
            await continued(up, "s")
            every = ["look", "crm__look", "find"]
            assert await names(tool_choice="none") == []
            assert await names(tool_choice={"type": "web_search"}) == every
            assert await names(tool_choice="required", parallel_tool_calls=False) == every
            grammar = engine.requests[-1].sampling.grammar
            assert grammar.source == "tool_choice"
            assert "tool_2" in grammar.text
            assert await names(tool_choice={"type": "function", "name": "find"}) == every
            assert "tool_1" not in engine.requests[-1].sampling.grammar.text
            some = [{"type": "function", "name": "find"}, {"type": "mcp"}]
            allowed = {"type": "allowed_tools", "mode": "auto", "tools": some}
            assert await names(tool_choice=allowed) == ["find"]
            assert engine.requests[-1].sampling.grammar is None
            assert await names(tool_choice={**allowed, "mode": "required"}) == ["find"]
            assert engine.requests[-1].sampling.grammar is not None

    run(test)


def test_what_agents_send_is_taken() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "ok")
        async with served(engine, chat) as up:
            body = {
                "model": "m", "store": False, "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "user": "u",
                "reasoning": {"effort": "low"}, "metadata": {"m": "n"}, "tools": [], "whatever": 1,
                "temperature": 0, "top_p": 0.5, "stream_options": {"include_obfuscation": False},
                "input": [
                    {"type": "message", "role": "developer",
                     "content": [{"type": "input_text", "text": "first"}]},
                    {"role": "system", "content": "second"},
                    {"type": "reasoning", "summary": [], "encrypted_content": "e"},
                    {"type": "web_search_call", "id": "ws", "status": "completed"},
                    user("hello"),
                    {"type": "function_call_output", "call_id": "c", "output":
                     [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                ],
            }  # fmt: skip
            answer = await up.post("/s/a/v1/responses", body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            assert (told["temperature"], told["top_p"], told["store"]) == (0, 0.5, False)
            assert told["metadata"] == {"m": "n"}
            assert told["reasoning"]["effort"] == "low"
            text = engine.requests[0].facts.text
            places = [text.index(word) for word in ("first", "second", "hello", "a\nb")]
            assert places == sorted(places)
            assert engine.requests[0].sampling.top_p == 0.5

    run(test)
