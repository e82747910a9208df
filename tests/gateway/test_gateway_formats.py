"""Every tool format: samples as models write them, read the same however the text is cut.

The samples follow the published templates of the models; a value that a format carries as text
comes back with the type that the tool's schema gives it.
"""

import json
import random
from typing import Any

import pytest
from fake_engine import chat_of, run, served, text_engine
from test_gateway_tools import cut, read

from forge_jax.gateway.messages import ToolCall
from forge_jax.gateway.parsers.blocks import MOST_READ, Before, Block, BlockParser, Format, Start
from forge_jax.gateway.parsers.formats import format_of, parser_for
from forge_jax.gateway.parsers.typed import typed

WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "mode": {"$ref": "#/$defs/mode"},
                "force": {"type": "boolean"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "owner": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
            "$defs": {"mode": {"type": "integer"}},
        },
    },
}
PLAN = {"type": "function", "function": {"name": "plan", "parameters": {"type": "object"}}}
TOOLS = (WRITE, PLAN)
CODE = 'if a < b:\n    print("</parameter>", "<tool_call>")\n'
QWEN = """<tool_call>
<function=write_file>
<parameter=path>
/tmp/a b.py
</parameter>
<parameter=content>
if a < b:
    print("</parameter>", "<tool_call>")

</parameter>
<parameter=mode>
420
</parameter>
<parameter=force>
True
</parameter>
<parameter=lines>
[1, 2]
</parameter>
<parameter=owner>
{"name": "é"}
</parameter>
</function>
</tool_call>"""
MINIMAX = """<minimax:tool_call>
<invoke name="write_file">
<parameter name="path">/tmp/a b.py</parameter>
<parameter name="content">if a < b:
    print("</parameter>", "<tool_call>")
</parameter>
<parameter name="mode">420</parameter>
<parameter name="force">true</parameter>
<parameter name="lines">[1, 2]</parameter>
<parameter name="owner">{"name": "é"}</parameter>
</invoke>
</minimax:tool_call>"""
ARGUMENTS = {
    "path": "/tmp/a b.py", "content": CODE, "mode": 420, "force": True, "lines": [1, 2],
    "owner": {"name": "é"},
}  # fmt: skip
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
LLAMA = f'{{"name": "write_file", "parameters": {WRITTEN}}}'
JSON = f'{{"name": "write_file", "arguments": {WRITTEN}}}'
CALL = ("write_file", ARGUMENTS)
NONE: tuple[str, dict[str, Any]] = ("plan", {})
# Of each format: text, what is content of it, its calls.
SAMPLES: dict[str, list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]] = {
    "qwen3_coder": [
        (f"I write.\n\n{QWEN}", "I write.", [CALL]),
        (f"{QWEN}\n{QWEN}", "", [CALL, CALL]),
        ("<tool_call>\n<function=plan>\n</function>\n</tool_call>", "", [NONE]),
        ("<tool_call><function=plan></function></tool_call>\nDone.", "Done.", [NONE]),
        (QWEN.removesuffix("</tool_call>"), "", [CALL]),
        (
            "<tool_call><function=f><parameter=x> 1 </parameter></function></tool_call>",
            "", [("f", {"x": " 1 "})],
        ),
    ],
    "minimax": [
        (f"I write.\n\n{MINIMAX}", "I write.", [CALL]),
        (
            MINIMAX.replace("</invoke>", '</invoke>\n<invoke name="plan">\n</invoke>'),
            "", [CALL, NONE],
        ),
        ('<minimax:tool_call>\n<invoke name="plan"></invoke>\n</minimax:t', "", [NONE]),
    ],
    "llama3": [
        (LLAMA, "", [CALL]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [CALL, CALL]),
        (f"I write. <|python_tag|>{LLAMA}", "I write.", [CALL]),
        (f"I write.\n{LLAMA};\n{LLAMA}", "I write.", [CALL, CALL]),
        ('\n {"type": "function", "name": "plan", "parameters": {}}', "", [NONE]),
    ],
    "json": [
        (JSON, "", [CALL]),
        (f"I write:\n\n```json\n{JSON}\n```\n", "I write:", [CALL]),
        (f"```\n[{JSON},\n {LLAMA}]\n```", "", [CALL, CALL]),
        (f"[{JSON}]", "", [CALL]),
        (f"{JSON}\n{JSON}", "", [CALL, CALL]),
        (f'[{{"id": "1", "type": "function", "function": {JSON}}}]', "", [CALL]),
        (f"```json\n{JSON}", "", [CALL]),
        (f"{JSON}; ```json\n{JSON}\n```", "", [CALL, CALL]),
        (f"{JSON}; {{x}}; {JSON}", f"; {{x}}; {JSON}", [CALL]),
    ],
}  # fmt: skip
# Text that means to be a call and cannot be read.
BROKEN = {
    "qwen3_coder": [
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=plan>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
    ],
    "minimax": [
        "<minimax:tool_call>\nplan()\n</minimax:tool_call>",
        '<minimax:tool_call><invoke name="a\n"></invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</invoke></minimax:tool_call>',
    ],
    "llama3": [
        '{"name": "plan", "parameters": [1]}\n',
        '{"name": "plan", "parameters": {a: 1}}\n',
        '{"name": "", "parameters": {}}\n',
        '<|python_tag|>{"x": 1}',
    ],
    "json": [
        '{"name": "plan", "arguments": 3}\n',
        '[{"name": "plan", "arguments": {}}, {"name": 3, "arguments": {}}]\n',
        '```json\n{"name": "plan", "arguments": {"x": NaN}}\n```',
    ],
}
# Text that is no call, however much it looks like one.
PLAIN = {
    "qwen3_coder": ["<tool_", "</tool_call>", "<function=f>", "a < b"],
    "minimax": ["<minimax:tool", "</invoke>", "<tool_call>"],
    "llama3": [
        '{"answer": {"name": "plan"}}', '{"name": "plan"}', "{", "{}", "{x}", "\n\n",
        'as {"name": "plan", "parameters": {}}', "[1]", "<|python", ";",
    ],
    "json": [
        "```python\nx = {}\n```", "[1, 2]", "[]", "[", "{}", '{"a": 1}', "``` {", "``", "text `x`",
        '```json\n{"a": 1}\n```', "```json\n",
    ],
}  # fmt: skip
FORMS = sorted(SAMPLES)


def told(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_read(form: str) -> None:
    for text, content, calls in SAMPLES[form]:
        for pieces in ([text], list(text)):
            parser = parser_for(form, TOOLS, "c")
            found = read(parser, pieces)
            assert (found[0], told(found[1])) == (content, calls)
            assert parser.malformed == 0
            assert [call.id for call in found[1]] == [f"c_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_call_stays_as_it_is(form: str) -> None:
    for malformed, texts in ((0, PLAIN[form]), (1, BROKEN[form])):
        for text in texts:
            parser = parser_for(form, TOOLS, "c")
            assert read(parser, list(text)) == (text, [])
            assert parser.malformed == malformed, text


@pytest.mark.parametrize("form", FORMS)
def test_a_broken_call_does_not_hide_the_next(form: str) -> None:
    for broken in BROKEN[form]:
        parser = parser_for(form, TOOLS, "c")
        text, content, calls = SAMPLES[form][0]
        said, found = read(parser, [f"{broken}\n{text}"])
        assert told(found) == calls
        assert said == f"{broken}\n{content}".rstrip("\n")
        assert parser.malformed == 1


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("form", FORMS)
def test_how_a_text_is_cut_does_not_matter(form: str, seed: int) -> None:
    rng = random.Random(seed)
    samples = [text for text, _, _ in SAMPLES[form]]
    parts = [samples, BROKEN[form], PLAIN[form], ["", " ", "\n", "; ", "Hm.", "é🦉"]]
    text = "".join(rng.choice(rng.choice(parts)) for _ in range(5))
    if rng.random() < 0.4:
        text = text[: rng.randrange(len(text) + 1)]
    results = []
    for pieces in ([text], cut(text, rng), list(text)):
        parser = parser_for(form, TOOLS, "c")
        results.append((read(parser, pieces), parser.malformed))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_swallowed_where_there_is_no_call(form: str) -> None:
    words = ["<tool_call>", "<minimax:tool_call>", "<function=f", ">", "{", "}", "[", '"', "name",
             '"name"', ":", "```", "json", "\n", " ", "<|python_tag|>", ";", "\\", "</function>",
             "</parameter>", "<parameter=a>", "</tool_call>", '<invoke name="', "x"]  # fmt: skip
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice(words) for _ in range(rng.randrange(20)))
        content, calls = read(parser_for(form, TOOLS, "c"), cut(text, rng))
        assert calls or content == text


class Counted:
    """A format that counts the characters it is asked to look at."""

    def __init__(self, inner: Format):
        self._inner, self.seen = inner, 0

    def start(self, text: str, before: Before, last: bool) -> Start:
        self.seen += len(text)
        return self._inner.start(text, before, last)

    def read(self, text: str, last: bool) -> Block | None:
        self.seen += len(text)
        return self._inner.read(text, last)


@pytest.mark.parametrize("form", FORMS)
def test_long_values_are_read_in_time_that_grows_with_them(form: str) -> None:
    long = SAMPLES[form][0][0].replace("print", "print()>}" * 20_000)
    pieces = [long[i : i + 4] for i in range(0, len(long), 4)]
    counted = Counted(format_of(form, TOOLS))
    (call,) = read(BlockParser(counted, "c"), pieces)[1]
    assert len(call.arguments) > 180_000
    assert counted.seen <= (MOST_READ + 1) * len(long)


def test_texts_get_the_types_of_their_schemas() -> None:
    whole = {"$defs": {"n": {"type": "number"}}}
    nullable = {"type": ["string", "null"]}
    deep = "[" * 9999
    expected: list[tuple[str, Any, Any]] = [
        ("1", {"type": "string"}, "1"), ("1", {}, "1"), ("1", None, "1"), ("1", True, "1"),
        ("1", {"type": "integer"}, 1), ("1.0", {"type": "integer"}, 1.0),
        ("1", {"$ref": "#/$defs/n"}, 1), ("1", {"$ref": "#/$defs/none"}, "1"),
        ("1", {"$ref": 3}, "1"), ("1.5", {"type": "integer"}, "1.5"),
        ("x", {"type": "integer"}, "x"), ("NaN", {"type": "number"}, "NaN"),
        ("False", {"type": "boolean"}, False), ("None", nullable, None), ("5", nullable, "5"),
        ('"a"', nullable, '"a"'), ("5", {"enum": [1, 5]}, 5), ("5", {"enum": ["5"]}, "5"),
        ("5", {"const": 5}, 5), ('{"a": 1}', {"oneOf": [{"type": "object"}]}, {"a": 1}),
        (deep, {"type": "array"}, deep),
    ]  # fmt: skip
    for text, schema, value in expected:
        found = typed(text, schema, whole)
        assert (found, type(found)) == (value, type(value)), (text, schema)


def test_malformed_calls_are_text_and_are_counted() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        broken = '<tool_call>{"name": 3}</tool_call>'
        async with served(text_engine(chat, f"{broken} {broken}", "ok"), chat) as up:
            body = {"messages": [{"role": "user", "content": "go"}], "tools": [WRITE]}
            for _ in range(2):
                made = (await up.post("/s/s/v1/chat/completions", body)).json()
            assert made["choices"][0]["message"]["content"] == "ok"
            assert [turn["malformed"] for turn in await up.turns("s")] == [2, 0]
            metrics = (await up.http.get("/metrics")).text
            assert "forge_tool_calls_malformed_total 2" in metrics
            assert [turn.malformed for turn in up.gateway.close("s")] == [2, 0]

    run(test)
