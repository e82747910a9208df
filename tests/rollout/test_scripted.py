"""The scripted engine answers from its rules and nothing else."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.schema import minimal
from forge_jax.rollout.script import Rule, When, answer, match, read_script
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Chunk, Facts, Finish, Grammar, Refused, Request, Sampling

TOKENIZER = ByteTokenizer()
END = 258
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "minLength": 2}, "deep": {"type": "boolean"}},
            "required": ["key"],
        },
    },
}


def run(rules: list[Rule], facts: Facts = Facts(), **sampling: Any) -> list[Chunk]:  # noqa: B008
    async def collect() -> list[Chunk]:
        engine = ScriptedEngine(rules, TOKENIZER, END)
        request = Request(
            prompt=np.array([1], np.int32), sampling=Sampling(**sampling), facts=facts
        )
        return [chunk async for chunk in engine.generate(request)]

    return asyncio.run(collect())


def ids(chunks: list[Chunk]) -> list[int]:
    return np.concatenate([chunk.ids for chunk in chunks]).tolist()


def test_the_first_rule_that_matches_wins() -> None:
    rules = [
        Rule(when=When(tools=True, tool_result=False), text="a"),
        Rule(when=When(json_schema=True), text="b"),
        Rule(when=When(call=2), text="c"),
        Rule(when=When(contains="secret"), text="d"),
        Rule(when=When(tool_result=True), text="e"),
        Rule(when=When(tools=False), text="f"),
    ]
    for facts, number in (
        (Facts(tools=(TOOL,)), 0),
        (Facts(tools=(TOOL,), json_schema={}), 0),
        (Facts(json_schema={}, call=2), 1),
        (Facts(call=2, text="a secret"), 2),
        (Facts(call=1, text="a secret"), 3),
        (Facts(tools=(TOOL,), tool_result=True), 4),
        (Facts(), 5),
    ):
        assert match(rules, facts) == (number, rules[number])


def test_a_script_needs_no_jax() -> None:
    code = "import sys, forge_jax.rollout.scripted; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_answer_is_tokens_with_a_closing_stop_id() -> None:
    chunks = run([Rule(text="hé")])
    assert len(chunks) == 1
    assert ids(chunks) == [*TOKENIZER.encode("hé"), END]
    assert chunks[0].finish is Finish.STOP
    assert not chunks[0].logprobs.any()
    assert not chunks[0].versions.any()
    assert ids(run([Rule(text="x<|im_end|>")])) == [120, END]


def test_chunks_and_delay_spread_the_same_answer() -> None:
    whole = ids(run([Rule(text="abcdefg")]))
    for pieces in (2, 3, 8, 50):
        began = time.monotonic()
        chunks = run([Rule(text="abcdefg", chunks=pieces, delay_seconds=0.05)])
        assert time.monotonic() - began > 0.04
        assert len(chunks) == min(pieces, 8)
        assert ids(chunks) == whole
        assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + [Finish.STOP]


def test_limits_and_stop_strings_cut_the_answer() -> None:
    cut = run([Rule(text="abcdef", chunks=2)], max_tokens=3)
    assert (ids(cut), cut[-1].finish) == ([97, 98, 99], Finish.LENGTH)
    stopped = run([Rule(text="abcdef", chunks=2)], stop=("zz", "cd"))
    assert (ids(stopped), stopped[-1].stop_text) == ([97, 98, 99, 100], "cd")
    assert stopped[-1].finish is Finish.STOP


def test_placeholders_are_the_first_tool_and_arguments_that_fit() -> None:
    rule = Rule(text='<tool_call>{"name": "{tool}", "arguments": {arguments}}</tool_call>{x}')
    other = {"type": "function", "function": {"name": "other"}}
    text = answer(rule, Facts(tools=(TOOL, other), json_schema={"type": "object"}))
    assert text == ('<tool_call>{"name": "look_up", "arguments": {"key": "aa"}}</tool_call>{x}')
    assert answer(Rule(text="{arguments}"), Facts(tools=(other,))) == "{}"
    schema = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"]}
    assert json.loads(answer(Rule(text="{arguments}"), Facts(json_schema=schema))) == {"n": 3}


@pytest.mark.parametrize(
    ("rules", "status", "message"),
    [
        ([Rule(when=When(tools=True), text="x")], 500, "call 4: 'hello'"),
        ([Rule(fail_status=429)], 429, "rule 0"),
        ([Rule(fail_status=503, text="busy")], 503, "busy"),
        ([Rule(text="{tool}")], 500, "rule 0: {tool}"),
        ([Rule(text="{arguments}")], 500, "rule 0: {arguments}"),
    ],
)
def test_refusals_have_the_status_and_say_why(rules: list[Rule], status: int, message: str) -> None:
    with pytest.raises(Refused, match=message.replace("{", r"\{")) as refused:
        run(rules, Facts(call=4, text="hello"))
    assert refused.value.status == status


SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": ["string", "null"], "minLength": 3},
    {"type": "integer", "minimum": 3, "multipleOf": 5},
    {"type": "integer", "exclusiveMinimum": 3},
    {"type": "integer", "maximum": -7},
    {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
    {"type": "number", "minimum": 0.25, "multipleOf": 0.5},
    {"type": "number", "exclusiveMaximum": -2},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["b", "a"]},
    {"const": {"k": [1]}},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "a"}], "minItems": 3},
    {"type": "object", "minProperties": 1, "properties": {"a": {"type": "null"}}},
    {"anyOf": [{"not": {}}, {"type": "string", "minLength": 1}]},
    {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]},
    {
        "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"n": {"type": "integer"}}}],
        "required": ["n"],
        "$defs": {"named": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
    },
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_minimal_value_is_valid(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(minimal(schema))


@pytest.mark.parametrize(
    ("kind", "facts", "follows"),
    [
        ("json", Facts(json_schema={}), True),
        ("grammar", Facts(tools=(TOOL,)), True),  # of a call of a tool
        ("regex", Facts(tools=(TOOL,)), False),
        ("choice", Facts(), False),
        ("grammar", Facts(), False),
    ],
)
def test_what_a_script_cannot_follow_is_refused(kind: str, facts: Facts, follows: bool) -> None:
    grammar = Grammar(kind=kind, text="", source="guided")
    if follows:
        assert run([Rule(text="x")], facts, grammar=grammar)
        return
    with pytest.raises(Refused, match="guided: ") as refused:
        run([Rule(text="x")], facts, grammar=grammar)
    assert (refused.value.status, refused.value.param) == (400, "guided")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a+"},
        {"not": {}},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"$ref": "#/$defs/none"},
        {"$ref": "other.json"},
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "tuple"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_met_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        minimal(schema)


def test_a_script_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(
        '[{"when": {"tools": true, "call": 0}, "text": "hi", "chunks": 2, "delay_seconds": 1},'
        ' {"fail_status": 500}]'
    )
    first, second = read_script(file)
    assert first == Rule(when=When(tools=True, call=0), text="hi", chunks=2, delay_seconds=1.0)
    assert second == Rule(fail_status=500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "script="),
        ("{}", "list of rules"),
        ('[{"text": "a"}, 3]', "rule 1"),
        ('[{"text": "a"}, {}]', "rule 1 .*text"),
        ('[{"text": "a", "colour": 3}]', r"rule 0\.colour"),
        ('[{"text": 3}]', r"rule 0\.text=3"),
        ('[{"text": "a", "when": {"tools": "yes"}}]', r"rule 0\.when\.tools='yes'"),
        ('[{"text": "a", "when": {"call": true}}]', r"rule 0\.when\.call=True"),
        ('[{"text": "a", "chunks": 0}]', "rule 0: chunks=0"),
        ('[{"text": "a", "delay_seconds": -1}]', r"rule 0: delay_seconds=-1"),
        ('[{"fail_status": 200}]', "rule 0: fail_status=200"),
    ],
)
def test_a_bad_script_is_the_users_mistake(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_script(file)
