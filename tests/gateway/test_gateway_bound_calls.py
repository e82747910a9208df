"""Calls that a grammar binds, in every tool format: the format's own parser reads them."""

import json

import jsonschema
import pytest
from test_gateway_structure import BARE, ITEM, SCHEMA, check_call, drawn, grammar_of, talk

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.messages import Piece, Thought, ToolCall
from forge_jax.gateway.parsers.formats import parser_for, reply_parser
from forge_jax.models.chat import ChatFormat
from forge_jax.types import Grammar

FORMS = ["hermes", "qwen3_coder", "minimax", "llama3", "json"]
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", "b c"]},
                "line": {"$ref": "#/$defs/line"},
                "done": {"type": "boolean"},
                "tags": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
            },
            "required": ["kind", "done"],
            "additionalProperties": False,
            "$defs": {"line": {"enum": [10, 20]}},
        },
    },
}
ANSWER = Grammar(
    kind="json",
    text=json.dumps(SCHEMA | {"additionalProperties": False}),
    source="response_format",
)
# What may stand before a call, and how far the format has then begun it.
BEGUN = {
    "hermes": "I look.\n<tool_call>", "qwen3_coder": "I look.\n<tool_call>",
    "minimax": "I look.\n<minimax:tool_call>", "llama3": "I look.\n{", "json": "I look.\n[{",
}  # fmt: skip


def read(reply: str, form: str, tools: tuple) -> list[Piece]:
    """The parts of a reply; none of one that was not drawn to its end."""
    if len(reply.encode()) > 1900:
        return []
    parser = parser_for(form, tools, "c")
    out = [*parser.feed(reply), *parser.finish()]
    assert parser.malformed == 0, reply
    return out


def check(call: Piece) -> None:
    assert isinstance(call, ToolCall)
    if call.name != "note":
        check_call(call)
    else:
        jsonschema.validate(json.loads(call.arguments), NOTE["function"]["parameters"])


@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_read_and_fits_its_schema(form: str) -> None:
    tools, counts, names = (NOTE, ITEM), set(), set()
    grammar = grammar_of(talk(*tools, must=True), None, form)
    single = grammar_of(talk(*tools, must=True, parallel=False), None, form)
    for seed in range(12):
        calls = read(drawn(grammar, seed), form, tools)
        counts |= {len(calls)} - {0}
        for call in calls:
            check(call)
            names.add(call.name)
        (call,) = read(drawn(single, seed), form, tools)
        check(call)
    assert min(counts) == 1 < max(counts)
    assert names == {"note", ITEM["function"]["name"]}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_may_come_in_place_of_an_answer(form: str) -> None:
    kinds = set()
    grammar = grammar_of(talk(ITEM, NOTE), ANSWER, form)
    for seed in range(16):
        pieces = read(drawn(grammar, seed), form, (ITEM, NOTE))
        for call in (piece for piece in pieces if isinstance(piece, ToolCall)):
            check(call)
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        if said:
            jsonschema.validate(json.loads(said), SCHEMA)
        kinds |= {type(piece) for piece in pieces}
    assert kinds == {str, ToolCall}


@pytest.mark.parametrize("form", FORMS)
def test_strict_tools_bind_calls_and_leave_text_alone(form: str) -> None:
    tools = (NOTE, BARE)
    grammar = grammar_of(talk(*tools), None, form)
    start = "any 日本 <tool text\n a {} [b]\n\nx"
    assert drawn(grammar, 3, start=start).startswith(start)
    names = set()
    for seed in range(16):
        first, *calls = read(drawn(grammar, seed, start=BEGUN[form]), form, tools) or ["I look."]
        assert first == "I look."
        for call in (piece for piece in calls if isinstance(piece, ToolCall)):
            check(call)
            names.add(call.name)
    assert "note" in names
    assert grammar_of(talk(BARE), None, form) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opened", [False, True])
def test_a_model_may_reason_before_it_is_bound(form: str, opened: bool) -> None:
    prompt = "<|im_start|>assistant\n" + "<think>\n" * opened
    chat = ChatFormat(template="", end_of_turn="x", tool_format=form, reasoning="think")
    said = talk(ITEM, must=True)
    grammar = grammar_of(said, None, form, "think", prompt)
    start = ("" if opened else "<think>\n") + 'Is it {"a"} <tool_call> or\n\n?\n</think>'
    parser = reply_parser(chat, said, prompt, "c")
    reply = drawn(grammar, 1, start=start)
    thought, call, *_ = [*parser.feed(reply), *parser.finish()]
    assert thought == Thought('Is it {"a"} <tool_call> or\n\n?')
    check(call)
    done = grammar_of(said, None, form, "think", "<think>\n\n</think>\n\n")
    check(read(drawn(done, 0), form, (ITEM,))[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opened", [False, True])
def test_no_call_is_bound_within_a_thought(form: str, opened: bool) -> None:
    grammar = grammar_of(talk(NOTE), None, form, "think", "x<think>\n" if opened else "x")
    opening = "" if opened else "<think>\n"
    start = f"{opening}Or {{a}} {BEGUN[form]} not?\n</think>\n\n{BEGUN[form]}"
    reply = drawn(grammar, 2, start=start).partition("</think>\n\n")[2]
    first, *calls = read(reply, form, (NOTE,)) or ["I look."]
    assert first == "I look."
    for call in (piece for piece in calls if isinstance(piece, ToolCall)):
        check(call)
    with pytest.raises(AssertionError):
        drawn(grammar, 2, start=start.replace("not?", "x") + "no call")


def test_texts_between_tags_are_any_text() -> None:
    parameters = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = grammar_of(talk(tool, must=True, parallel=False), None, "qwen3_coder")
    start = "<tool_call>\n<function=f>\n<parameter=a>\nx < y\n\n{</parameter>\n<parameter=b>\n"
    (call,) = read(drawn(grammar, 0, start=start), "qwen3_coder", (tool,))
    arguments = json.loads(call.arguments)
    assert arguments["a"] == "x < y\n\n{"
    assert isinstance(arguments["b"], int)
    within = start.partition("{")[0]
    assert drawn(grammar, 0, start=f"{within}</function>\n</tool_call ")
    with pytest.raises(AssertionError):  # a value that the parser would take for a broken call
        drawn(grammar, 0, start=f"{within}</function>\n</tool_call>")


def test_what_tags_cannot_bind_is_refused_by_name() -> None:
    for function in (
        {"name": "a>b"},
        {"name": "f", "strict": True, "parameters": {"anyOf": [{"type": "object"}]}},
        {"name": "f", "parameters": {"properties": {"x>": {}}}},
        {"name": "f", "parameters": [1]},
    ):
        tool = {"type": "function", "function": function}
        with pytest.raises(ApiError) as refused:
            grammar_of(talk(tool, must=True), None, "qwen3_coder")
        assert (refused.value.status, refused.value.param) == (400, "tools")
