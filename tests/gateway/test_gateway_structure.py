"""Grammars that clients ask for: what is read of a body, and what of a reply they let through."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_engine import LOOK, FakeEngine, chat_of, run, served
from test_gateway_protocols import USER, text_engine

from forge_jax.gateway.calling import reply_grammar
from forge_jax.gateway.messages import Conversation, Message, ToolCall
from forge_jax.gateway.parsers.formats import parser_for
from forge_jax.models.chat import ChatFormat
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.grammar import Grammars
from forge_jax.types import Grammar, Refused

NEWLINE, END = 10, 258
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ITEM = {
    "type": "function",
    "function": {
        "name": 'it"em é',
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/count"}, "on": {"type": "boolean"}},
            "required": ["n", "on"],
            "additionalProperties": False,
            "$defs": {"count": {"enum": [1, 2, 30]}},
        },
    },
}
BARE = {"type": "function", "function": {"name": "bare"}}
SAID: list[tuple[dict, str, object, str]] = [
    ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
    ({"response_format": FORMAT}, "json", SCHEMA, "response_format"),
    ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA, "guided_json"),
    ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
    ({"guided_choice": ["a", "é"]}, "choice", ["a", "é"], "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "b"}}, "regex", "b", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["c"]}}, "choice", ["c"], "structured_outputs.choice"),
    (
        {"structured_outputs": {"grammar": "start: /d/", "structural_tag": None}},
        "grammar", "start: /d/", "structured_outputs.grammar",
    ),
    (
        {"structured_outputs": {"json_object": True}},
        "json", {"type": "object"}, "structured_outputs.json_object",
    ),
]  # fmt: skip
NOTHING: list[dict] = [
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}},
    {"guided_json": None, "structured_outputs": {"regex": None, "json_object": False}},
    {"tool_choice": "auto", "tools": [LOOK]},
    {"tool_choice": "none", "tools": [ITEM]},
]
WRONG: list[tuple[dict, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"schema": {}}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"guided_json": [1]}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"const": "\ud800"}}, "guided_json"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_regex": "\ud800"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always", "tools": [LOOK]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [LOOK]}, "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [LOOK]},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required", "tools": [LOOK], "guided_regex": "a"}, "guided_regex"),
    ({"parallel_tool_calls": 3, "tools": [LOOK]}, "parallel_tool_calls"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
        },
        "tools[0].function.parameters",
    ),
]


def test_a_body_says_what_its_answer_belongs_to() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "x")
        async with served(engine, chat) as up:
            for body, kind, text, source in SAID:
                for path, prompt in (("chat/completions", USER), ("completions", "x")):
                    named = "messages" if prompt is USER else "prompt"
                    answer = await up.post(f"/v1/{path}", {named: prompt, **body})
                    assert answer.status_code == 200, answer.text
                    request = engine.requests[-1]
                    grammar = request.sampling.grammar
                    assert grammar is not None
                    assert (grammar.kind, grammar.source) == (kind, source)
                    read = json.loads(grammar.text) if kind in ("json", "choice") else grammar.text
                    assert read == text
                    assert request.facts.json_schema == (text if kind == "json" else None)
            for body in NOTHING:
                await up.post("/v1/chat/completions", {"messages": USER, **body})
                assert engine.requests[-1].sampling.grammar is None

    run(test)


def test_what_is_no_form_of_an_answer_is_refused_by_name() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            for body, param in WRONG:
                raw = json.dumps({"messages": USER, **body})
                answer = await up.http.post("/v1/chat/completions", content=raw)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == param, body
                assert param.partition(".")[0] in error["message"]

    run(test)


def test_the_engines_refusal_names_the_field() -> None:
    async def test() -> None:
        chat, refused = chat_of("chatml"), Refused(400, "guided_regex: (", param="guided_regex")
        async with served(FakeEngine(lambda _: refused), chat) as up:
            answer = await up.post("/v1/chat/completions", {"messages": USER, "guided_regex": "("})
            assert answer.json()["error"]["param"] == "guided_regex"

    run(test)


def drawn(grammar: Grammar | None, seed: int, stop: int = END, start: str = "") -> str:
    """A reply drawn evenly of what may come behind `start`."""
    assert grammar is not None
    matcher = Grammars(ByteTokenizer(), 264, (stop,)).matcher(grammar)
    rng, out = random.Random(seed), list(start.encode())
    while len(out) < 2000:
        assert matcher.advance(np.array(out, np.int32), 1) is None
        bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
        choice = rng.choice(np.flatnonzero(bits).tolist())
        if choice == stop:
            break
        out.append(choice)
    return bytes(out).decode("utf-8", "replace")


def grammar_of(
    said: Conversation, answer: Grammar | None, form: str, reasoning: str = "none", prompt: str = ""
) -> Grammar | None:
    chat = ChatFormat(template="", end_of_turn="<|im_end|>", tool_format=form, reasoning=reasoning)
    return reply_grammar(said, answer, chat, prompt)


def read(reply: str, form: str, tools: tuple) -> list[str | ToolCall]:
    parser = parser_for(form, tools, "c")
    return [*parser.feed(reply), *parser.finish()]


def talk(*tools: Any, must: bool = False, parallel: bool = True) -> Conversation:
    messages = (Message(role="user", content="hi"),)
    call = tools if must else ()
    return Conversation(messages=messages, tools=tools, must_call=call, parallel=parallel)


def check_call(call: str | ToolCall) -> None:
    assert isinstance(call, ToolCall)
    (tool,) = (t for t in (ITEM, BARE) if t["function"]["name"] == call.name)
    schema = tool["function"].get("parameters", {})
    jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("tools", [(ITEM,), (ITEM, ITEM | {"x": 1})], ids=["one", "two"])
def test_a_required_call_is_one_that_the_parser_reads(tools: tuple) -> None:
    counts = set()
    for seed in range(12):
        reply = drawn(grammar_of(talk(*tools, must=True), None, "hermes"), seed)
        calls = read(reply, "hermes", tools)
        counts.add(len(calls))
        for call in calls:
            check_call(call)
    assert min(counts) == 1 < max(counts)
    single = grammar_of(talk(*tools, must=True, parallel=False), None, "hermes")
    assert all(len(read(drawn(single, s), "hermes", tools)) == 1 for s in range(12))


def test_a_call_may_come_in_place_of_a_formatted_answer() -> None:
    wanted = Grammar(kind="json", text=json.dumps(SCHEMA | {"additionalProperties": False}),
                     source="response_format")  # fmt: skip
    kinds = set()
    for seed in range(20):
        reply = drawn(grammar_of(talk(ITEM), wanted, "hermes"), seed)
        for piece in read(reply, "hermes", (ITEM,)):
            kinds.add(type(piece))
            if isinstance(piece, str):
                jsonschema.validate(json.loads(piece), SCHEMA)
            else:
                check_call(piece)
    assert kinds == {str, ToolCall}
    required = grammar_of(talk(ITEM, must=True), wanted, "hermes")
    check_call(read(drawn(required, 0), "hermes", (ITEM,))[0])


def test_strict_tools_bind_calls_and_leave_text_alone() -> None:
    grammar = grammar_of(talk(ITEM, BARE), None, "hermes")
    assert drawn(grammar, 3, start="any 日本 <tool text").startswith("any 日本 <tool text")
    names = set()
    for seed in range(20):
        start = "I look.\n<tool_call>"
        reply = drawn(grammar, seed, start=start)
        first, call, *_ = read(reply, "hermes", (ITEM, BARE))
        assert first == "I look."
        if len(reply) < 1900:
            check_call(call)
            names.add(call.name)
    assert ITEM["function"]["name"] in names
    assert grammar_of(talk(LOOK, BARE), None, "hermes") is None


def test_the_lookup_format_has_its_own_calls() -> None:
    for seed in range(5):
        grammar = grammar_of(talk(LOOK, must=True, parallel=False), None, "lookup")
        (call,) = read(drawn(grammar, seed, stop=NEWLINE), "lookup", (LOOK,))
        assert isinstance(call, ToolCall)
        assert call.name == "look"
        assert json.loads(call.arguments)["key"]


def test_the_lookup_format_names_one_of_several_tools() -> None:
    called = set()
    other = {**LOOK, "function": {**LOOK["function"], "name": "other"}}
    for seed in range(12):
        grammar = grammar_of(talk(LOOK, other, must=True, parallel=False), None, "lookup")
        (call,) = read(drawn(grammar, seed, stop=NEWLINE), "lookup", (LOOK, other))
        assert isinstance(call, ToolCall)
        called.add(call.name)
    assert called == {"look", "other"}


@pytest.mark.parametrize("parallel", [True, False])
def test_the_lookup_format_has_several_calls_where_they_are_allowed(parallel: bool) -> None:
    other = {**LOOK, "function": {**LOOK["function"], "name": "other"}}
    for tools in ((LOOK,), (LOOK, other)):
        asked = talk(*tools, must=True, parallel=parallel)
        grammar = grammar_of(asked, None, "lookup")
        found = [read(drawn(grammar, n, stop=NEWLINE), "lookup", tools) for n in range(8)]
        assert all(isinstance(one, ToolCall) for reply in found for one in reply)
        assert (max(map(len, found)) > 1) == parallel


def test_the_lookup_format_types_the_values_of_a_call() -> None:
    move = {"x": {"type": "integer"}, "to": {"type": "string"}}
    function = {"name": "move", "parameters": {"type": "object", "properties": move}}
    tools = (LOOK, {"type": "function", "function": function})
    for text, name, arguments in (
        ("?move 7 New York\n", "move", {"x": 7, "to": "New York"}),
        ("?move far\n", "move", {"x": "far"}),
        ("?move\n", "move", {}),
        ("?look a b\n", "look", {"key": "a b"}),
        ("?gone 1\n", "gone", {}),
    ):
        (call,) = read(text, "lookup", tools)
        assert isinstance(call, ToolCall)
        assert (call.name, json.loads(call.arguments)) == (name, arguments)
    assert read("? 7\n", "lookup", tools) == ["? 7\n"]


def test_the_lookup_format_calls_the_tool_that_was_asked_for() -> None:
    async def test() -> None:
        chat, other = chat_of("lookup"), {**LOOK, "function": {**LOOK["function"], "name": "other"}}
        forced = {"type": "function", "function": {"name": "other"}}
        async with served(text_engine(chat, "?k1"), chat) as up:
            create = up.of("s").chat.completions.create
            made = await create(model="m", messages=USER, tools=[LOOK, other], tool_choice=forced)
            (call,) = made.choices[0].message.tool_calls
            assert call.function.name == "other"

    run(test)
