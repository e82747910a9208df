"""Tool calls in the model's text: found wherever the text is cut, malformed ones kept."""

import json
import random

import pytest

from forge_jax.gateway.messages import ToolCall, canonical
from forge_jax.gateway.parsers.formats import parser_for
from forge_jax.gateway.parsers.lookup import LookupParser
from forge_jax.gateway.parsers.protocol import PlainText, ReplyParser, overlap

LOOK = {"name": "look", "parameters": {"properties": {"key": {}, "other": {}}}}
GOOD = [
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>{"arguments":{"s":"</tool_call> and <tool_call>"},"name":"g"}</tool_call>',
    '<tool_call>{"name":"h","arguments":"{\\"x\\": [1, {}]}"}</tool_call>',
    '<tool_call>{"name": "no_arguments"} </tool_call>',
    '<tool_call>{"name":"ü","arguments":{"k":"\\ud800 é 🦉"}}</tool_call>',
]
BAD = [
    "<tool_call></tool_call>",
    "<tool_call>not json</tool_call>",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}} trailing</tool_call>',
    '<tool_call>["f", {}]</tool_call>',
    "<tool_call>" + "[" * 5000 + "</tool_call>",
]
TEXTS = ["", " ", "\n\n", "Hm.", "a < b <tool", " <tool_call", "</tool_call>", "é🦉 \n", "{}"]


def hermes() -> ReplyParser:
    return parser_for("hermes", ({"function": LOOK},), "c")


def read(parser: ReplyParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    out = [found for piece in pieces for found in parser.feed(piece)] + parser.finish()
    assert "" not in out
    return (
        "".join(found for found in out if isinstance(found, str)),
        [found for found in out if isinstance(found, ToolCall)],
    )


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(8))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_a_number_beyond_all_numbers_is_the_largest() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": [1e999, -1E999]}}</tool_call>'
    [found] = read(hermes(), [call])[1]
    assert found.arguments == '{"x":[1.7976931348623157e+308,-1.7976931348623157e+308]}'


@pytest.mark.parametrize("seed", range(60))
def test_how_the_text_is_cut_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(rng.choice([GOOD, BAD[:-1], TEXTS])) for _ in range(6))
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text) + 1)]
    whole = read(hermes(), [text])
    assert read(hermes(), cut(text, rng)) == whole
    assert read(hermes(), list(text)) == whole


@pytest.mark.parametrize("text", GOOD)
def test_a_well_formed_call_is_found_and_is_not_content(text: str) -> None:
    content, calls = read(hermes(), [f"Say.\n{text}\n"])
    assert content == "Say."
    (call,) = calls
    assert isinstance(json.loads(call.arguments), dict)
    assert call.id == "c_0"
    call.arguments.encode()


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_call_is_content_and_is_counted(text: str) -> None:
    parser = hermes()
    assert read(parser, [f"Say.\n{text}\n"]) == (f"Say.\n{text}\n", [])
    assert parser.malformed == 1


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    content, calls = read(hermes(), ["".join([BAD[1], GOOD[0], BAD[7], GOOD[1]])])
    assert content == BAD[1] + BAD[7]
    assert [(c.id, c.name) for c in calls] == [("c_0", "f"), ("c_1", "g")]


def test_a_call_may_end_with_the_reply() -> None:
    for end in ("", " ", "</tool_c"):
        content, calls = read(hermes(), ['<tool_call>{"name":"f"}' + end])
        assert (content, [c.name for c in calls]) == ("", ["f"])
    assert read(hermes(), ['<tool_call>{"name":"f'])[0] == '<tool_call>{"name":"f'


def test_text_without_calls_is_left_as_it_is() -> None:
    for text in (" \n", "  a  ", "\na\n\n", "<tool_cal"):
        assert read(hermes(), list(text)) == (text, [])


@pytest.mark.parametrize("seed", range(10))
def test_lookup(seed: int) -> None:
    rng = random.Random(seed)
    for text in ("?k17", "?", "? a \tb", '?"é'):
        content, (call,) = read(LookupParser(({"function": LOOK},), "c"), cut(text, rng))
        assert (content, call.name, json.loads(call.arguments)) == ("", "look", {"key": text[1:]})
    for text in ("!3", "x?y", " ?k", ""):
        assert read(LookupParser(({"function": LOOK},), "c"), cut(text, rng)) == (text, [])


@pytest.mark.parametrize("seed", range(5))
def test_lookups_with_tabs_between_are_several_calls(seed: int) -> None:
    parser = LookupParser(({"function": LOOK},), "c")
    content, calls = read(parser, cut("?a\t?b c\t?\td?", random.Random(seed)))
    assert (content, [call.id for call in calls]) == ("", ["c_0", "c_1", "c_2"])
    assert [json.loads(call.arguments)["key"] for call in calls] == ["a", "b c", "\td?"]
    tools = ({"function": LOOK}, {"function": {**LOOK, "name": "other"}})
    both = LookupParser(tools, "c")
    assert [one.name for one in read(both, ["?look a\t?other b"])[1]] == ["look", "other"]
    nameless = LookupParser(tools, "c")
    assert read(nameless, ["?look a\t? b"]) == ("?look a\t? b", [])
    assert nameless.malformed == 1


def test_a_tool_without_parameters_cannot_be_looked_up() -> None:
    for function in ({"name": "f"}, {"name": "f", "parameters": []}):
        assert read(LookupParser(({"function": function},), "c"), ["?", "x"]) == ("?x", [])


def test_only_offered_tools_are_parsed() -> None:
    assert isinstance(parser_for("hermes", (), "c"), PlainText)
    with pytest.raises(NotImplementedError, match="other"):
        parser_for("other", ({"function": LOOK},), "c")


def test_overlap_is_the_longest_end_that_could_go_on() -> None:
    assert overlap("a<tool", "<tool_call>") == 5
    assert overlap("<tool_call>", "<tool_call>") == 0
    assert overlap("aab", "abc", "bcd") == 2
    assert overlap("abc") == 0


def test_canonical_arguments() -> None:
    same = ['{"b": 1.0, "a": [true, "x"]}', '{ "a":[ true,"x"],\n"b":1}']
    assert canonical(same[0]) == canonical(same[1])
    for number in (2**53 + 1, 12345678901234567890, 10**22 + 1):  # JavaScript rounds them
        assert canonical(str(number)) == canonical(str(int(float(number))))
    assert canonical(str(2**53 - 1)) != canonical(str(2**53))
    assert canonical('{"a": 1}') != canonical('{"a": true}')
    assert canonical('{"a": 1}') != canonical('{"a": "1"}')
    for text in ("not json", "[" * 600 + "]" * 600, "1" * 5000, "1" * 400):
        assert canonical(text) == text
