"""Reasoning apart from the answer, in every protocol, and back in the history of later calls."""

import itertools
import json
import random
from pathlib import Path

import pytest
from anthropic import AsyncAnthropic
from fake_engine import LOOK, FakeEngine, Served, chat_of, run, served, text_engine
from pair_tokenizer import PairTokenizer
from test_gateway_protocols import USER
from test_gateway_tools import cut

from forge_jax.gateway.messages import Piece, Thought, ToolCall
from forge_jax.gateway.parsers.formats import parser_for
from forge_jax.gateway.parsers.thoughts import ThoughtParser
from forge_jax.gateway.signing import sealed, signature, signed, unsealed
from forge_jax.models.chat import Chat, ChatFormat

QWEN_LIKE = (Path(__file__).parent.parent / "models" / "qwen_like.jinja").read_text()
OPENS = '{{- "<|im_start|>assistant\\n" }}\n    {%- if enable_thinking'
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
THOUGHT = "I must\n\nlook <b>."


def chat(opens: bool = False) -> Chat:
    """A model that reasons; `opens`: its template begins every thought for it."""
    template = QWEN_LIKE
    if opens:
        assert OPENS in template
        template = template.replace(OPENS, OPENS.replace('\\n" }}', '\\n<think>\\n" }}', 1))
    form = ChatFormat(template=template, end_of_turn="<|im_end|>", reasoning="think")
    return Chat(tokenizer=PairTokenizer(), format=form)


def reply(thought: str, answer: str, opens: bool = False) -> str:
    return f"{'' if opens else '<think>'}\n{thought}\n</think>\n\n{answer}"


def engine(*texts: str, opens: bool = False, chunk: int = 3) -> FakeEngine:
    return text_engine(chat(opens), *texts, chunk=chunk)


def split(pieces: list[Piece]) -> tuple[str, str, int]:
    return (
        "".join(p.text for p in pieces if isinstance(p, Thought)),
        "".join(p for p in pieces if isinstance(p, str)),
        sum(isinstance(p, ToolCall) for p in pieces),
    )


@pytest.mark.parametrize("seed", range(30))
def test_how_a_reply_is_cut_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    words = ["<think>", "</think>", "<think", "</th", "\n", "  ", "a", "é", CALL, "\n\n"]
    text = "".join(rng.choice(words) for _ in range(rng.randrange(8)))
    for opened in (False, True):
        found = []
        for pieces in ([text], list(text), cut(text, rng)):
            parser = ThoughtParser(parser_for("hermes", (LOOK,), "c"), opened)
            out = [p for piece in pieces for p in parser.feed(piece)] + parser.finish()
            assert "" not in out
            assert Thought("") not in out
            found.append((split(out), parser.malformed))
        assert found[0] == found[1] == found[2]


def test_a_thought_is_what_the_tags_enclose() -> None:
    expected = [
        ("<think>\nx y\n</think>\n\nz", False, ("x y", "z", 0)),
        ("x y\n</think>\n\nz", True, ("x y", "z", 0)),
        ("<think>x</think>z", True, ("x", "z", 0)),
        ("<think>\n\n</think>\n\n z </think>", False, ("", "z </think>", 0)),
        ("z <think>x</think>", False, ("", "z <think>x</think>", 0)),
        (" z\n", False, ("", " z\n", 0)),
        (f"<think>{CALL}</think>{CALL}", False, (CALL, "", 1)),
        ("<think>cut ", False, ("cut", "", 0)),
        ("cut </thi", True, ("cut </thi", "", 0)),
        ("<thi", False, ("", "<thi", 0)),
    ]
    for text, opened, parts in expected:
        parser = ThoughtParser(parser_for("hermes", (LOOK,), "c"), opened)
        assert split([*parser.feed(text), *parser.finish()]) == parts, text


@pytest.mark.parametrize(
    "text", ["abc</think>\n\nd", "a <think>b</think> c", "</think>", "<b></think>"]
)
@pytest.mark.parametrize("form", [chat(), chat_of("chatml")], ids=["thinks", "plain"])
def test_tags_that_enclose_no_thought_are_text(form: Chat, text: str) -> None:
    async def test() -> None:
        async with served(text_engine(form, text), form) as up:
            create = up.of("s").chat.completions.create
            made = (await create(model="m", messages=USER)).choices[0].message
            assert made.content == text
            back = {"role": "assistant", "content": text}
            more = {"role": "tool", "tool_call_id": "x", "content": "b"}
            await create(model="m", messages=[*USER, back, more])
            assert await chained(up, "s") == [True]

    run(test)


def test_signatures_and_seals_are_ours_alone() -> None:
    for thought in ("", "é 🦉", "\ufffd"):
        assert signed(thought, signature(thought))
        assert not signed(thought + "x", signature(thought))
        assert unsealed(sealed(thought)) == thought
    for other in ("", "x", "é", "\ud800", sealed("a")[:-4] + "AAA=", "AAAA" * 20):
        assert not signed("a", other)
        assert unsealed(other) == ""


async def chained(up: Served, session: str) -> list[bool]:
    """Whether each call's prompt begins with prompt and output of the call before."""
    turns = await up.turns(session)
    return [
        after["prompt_ids"][: len(before["prompt_ids"]) + len(before["output_ids"])]
        == before["prompt_ids"] + before["output_ids"]
        for before, after in itertools.pairwise(turns)
    ]


# What becomes of a thought on its way back, by the kind of client.
KEEPS = {
    "kept": ("reasoning_content", THOUGHT), "renamed": ("reasoning", THOUGHT),
    "dropped": ("reasoning_content", None), "changed": ("reasoning_content", "Other."),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_chat_completions_tell_thoughts_and_take_them_back(opens: bool, stream: bool) -> None:
    async def test() -> None:
        texts = [reply(THOUGHT, f"Well. {CALL}", opens), reply("Done.", "a", opens)]
        form = chat(opens)
        for session, (name, value) in KEEPS.items():
            async with served(engine(*texts, opens=opens), form) as up:
                said = await asked(up, session, stream)
                assert (said["content"], said["reasoning_content"]) == ("Well.", THOUGHT)
                (call,) = said["tool_calls"]
                back = {"role": "assistant", "content": "Well.", "tool_calls": [call], name: value}
                result = {"role": "tool", "tool_call_id": call["id"], "content": "b"}
                await up.of(session).chat.completions.create(
                    model="m", messages=[*USER, back, result], tools=[LOOK]
                )
                assert await chained(up, session) == [session != "changed"]

    run(test)


async def asked(up: Served, session: str, stream: bool) -> dict:
    create = up.of(session).chat.completions.create
    if not stream:
        made = await create(model="m", messages=USER, tools=[LOOK])
        details = made.usage.completion_tokens_details
        assert 0 < details.reasoning_tokens < made.usage.completion_tokens
        return made.choices[0].message.model_dump(exclude_none=True)
    told: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    async for chunk in await create(model="m", messages=USER, tools=[LOOK], stream=True):
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for key in told:
            told[key] += delta.get(key, type(told[key])())
    told["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in told["tool_calls"]]
    return told


def test_a_user_who_speaks_ends_a_thought_where_the_template_says_so() -> None:
    async def test() -> None:
        async with served(engine(reply(THOUGHT, "One.")), chat()) as up:
            create = up.of("s").chat.completions.create
            made = await create(model="m", messages=USER)
            back = made.choices[0].message.model_dump(exclude_none=True)
            await create(model="m", messages=[*USER, back, *USER])
            assert await chained(up, "s") == [False]
            text = chat().tokenizer.decode((await up.turns("s"))[1]["prompt_ids"])
            assert "One." in text
            assert "think" not in text

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_thoughts_only_where_they_are_asked_for(stream: bool) -> None:
    async def test() -> None:
        texts = [reply(THOUGHT, f"Well. {CALL}"), reply("Done.", "a")]
        tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
        for session, thinking in (("on", {"type": "adaptive"}), ("off", {"type": "disabled"})):
            async with served(engine(*texts), chat()) as up:
                client = AsyncAnthropic(base_url=f"{up.url}/s/{session}", api_key="k")
                asks = {"model": "m", "max_tokens": 99, "tools": [tool], "thinking": thinking}
                if stream:
                    async with client.messages.stream(messages=USER, **asks) as events:
                        made = await events.get_final_message()
                else:
                    made = await client.messages.create(messages=USER, **asks)
                kinds = [block.type for block in made.content]
                assert kinds == ["thinking"] * (session == "on") + ["text", "tool_use"]
                if session == "on":
                    assert made.content[0].thinking == THOUGHT
                    assert signed(THOUGHT, made.content[0].signature)
                result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "b"}
                back = {"role": "assistant", "content": [b.to_dict() for b in made.content]}
                talk = [*USER, back, {"role": "user", "content": [result]}]
                await client.messages.create(messages=talk, **asks)
                assert await chained(up, session) == [True]
                await client.close()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_all_thought_is_not_lost(stream: bool) -> None:
    async def test() -> None:
        async with served(engine("<think>\nOn and on"), chat()) as up:
            body = {"model": "m", "max_tokens": 30, "messages": USER, "stream": stream}
            told = (await up.post("/v1/messages", body)).text
            if stream:
                assert told.count("event: content_block_start") == 1
                assert '"text_delta","text":"On and on"' in told
            else:
                assert json.loads(told)["content"] == [{"type": "text", "text": "On and on"}]
            told = (await up.post("/v1/chat/completions", {**body, "stream": False})).json()
            message = told["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("", "On and on")

    run(test)


@pytest.mark.parametrize("how", ["content", "sealed", "stored", "dropped"])
@pytest.mark.parametrize("stream", [False, True])
def test_responses_tell_thoughts_as_items(how: str, stream: bool) -> None:
    async def test() -> None:
        texts = [reply(THOUGHT, f"Well. {CALL}"), reply("Done.", "a")]
        tool = {"type": "function", **LOOK["function"]}
        async with served(engine(*texts), chat()) as up:
            client = up.of("s").responses
            asks = {"model": "m", "tools": [tool]}
            if how == "sealed":
                asks |= {"store": False, "include": ["reasoning.encrypted_content"]}
            if stream:
                async with client.stream(input=USER, **asks) as events:
                    deltas = [
                        e.delta async for e in events if e.type == "response.reasoning_text.delta"
                    ]
                    assert "".join(deltas) == THOUGHT
                    made = await events.get_final_response()
            else:
                made = await client.create(input=USER, **asks)
            items = [item.to_dict() for item in made.output]
            assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
            assert items[0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
            assert made.usage.output_tokens_details.reasoning_tokens > 0
            output = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "b"}
            for item in items:
                item.pop("parsed_arguments", None)
            if how == "sealed":
                assert unsealed(items[0]["encrypted_content"]) == THOUGHT
                items[0]["content"] = []
            if how == "stored":
                asks["previous_response_id"], items = made.id, []
            if how == "dropped":
                items = items[1:]
            before = USER if how != "stored" else []
            await client.create(input=[*before, *items, output], **asks)
            assert await chained(up, "s") == [True]

    run(test)
