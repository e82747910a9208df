"""Templates of model families: the format is known by them, and what they write is read back.

Only the parts that write calls and reasoning are here, as the published templates have them.
"""

import itertools
import json
import random
from typing import Any

import pytest
from fake_engine import FakeEngine, run, served
from openai import BadRequestError
from pair_tokenizer import PairTokenizer, sampled
from test_gateway_formats import TOOLS

from forge_jax.gateway.messages import ToolCall
from forge_jax.gateway.parsers.formats import parser_for
from forge_jax.models.chat import Chat, ChatFormat, built_in, reasoning_of, tool_format_of

HEAD = """{%- set ns = namespace(user=-1, called=none) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- "<|im_start|>" ~ m.role ~ "\\n" }}
"""
FOOT = """{{- "<|im_end|>\\n" }}
{%- endfor %}
"""
PROMPT = '{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}'
LLAMA3 = """
{%- if m.tool_calls %}
    {%- for call in m.tool_calls %}
        {{- "; " if not loop.first }}
        {{- '{"name": "' + call.function.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.function.arguments | tojson }}
        {{- "}" }}
    {%- endfor %}
{%- else %}{{- m.content }}{% endif %}
"""
QWEN3_CODER = """
{{- m.content }}
{%- for call in m.tool_calls or [] %}
    {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
    {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' }}
        {{- value | tojson if value is mapping or (value is sequence and value is not string)
            else value | string }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}
"""
MINIMAX = """
{%- if m.role == "tool" and not ns.called %}
    {{- raise_exception("there was no previous assistant message with a tool call!") }}
{%- endif %}
{%- if m.role == "assistant" %}{% set ns.called = m.tool_calls %}{% endif %}
{%- set thought, answer = m.reasoning_content or "", m.content %}
{%- if "</think>" in answer %}
    {%- set thought = answer.split("</think>")[0].strip("\\n").split("<think>")[-1].strip("\\n") %}
    {%- set answer = answer.split("</think>")[-1].strip("\\n") %}
{%- endif %}
{%- if thought and loop.index0 > ns.user %}
    {{- "<think>\\n" ~ thought ~ "\\n</think>\\n\\n" }}
{%- endif %}
{{- answer }}
{%- if m.tool_calls %}
    {{- "\\n<minimax:tool_call>\\n" }}
    {%- for call in m.tool_calls %}
        {{- '<invoke name="' + call.function.name + '">' }}
        {%- for k, v in call.function.arguments | items %}
            {{- '\\n<parameter name="' + k + '">' }}
            {{- v if v is string else v | tojson }}
            {{- '</parameter>' }}
        {%- endfor %}
        {{- '\\n</invoke>\\n' }}
    {%- endfor %}
    {{- "</minimax:tool_call>" }}
{%- endif %}
"""
TEMPLATES = {
    "llama3": HEAD + LLAMA3 + FOOT + PROMPT,
    "qwen3_coder": HEAD + QWEN3_CODER + FOOT + PROMPT,
    "minimax": HEAD + MINIMAX + FOOT + PROMPT.replace("assistant\\n", "assistant\\n<think>\\n"),
}
WORDS = ["a", "é🦉", "\n", "  ", "<", "</tool_call>", "<parameter=a>", "{", '"', "; ", "True", "1"]


def chat(form: str) -> Chat:
    template = TEMPLATES[form]
    found = ChatFormat(
        template=template,
        end_of_turn="<|im_end|>",
        tool_format=tool_format_of(template),
        reasoning=reasoning_of(template),
    )
    return Chat(tokenizer=PairTokenizer(), format=found)


def random_call(rng: random.Random) -> dict[str, Any]:
    text = lambda: "".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))  # noqa: E731
    arguments = {
        "path": text(), "content": text(), "mode": rng.randrange(9), "force": rng.random() < 0.5,
        "lines": [1, 2][: rng.randrange(3)], "owner": rng.choice([None, {"a": text()}]),
    }  # fmt: skip
    kept = {key: value for key, value in arguments.items() if rng.random() < 0.7}
    function = {"name": "write_file", "arguments": json.dumps(kept)}
    return {"id": "x", "type": "function", "function": function}


def written(form: str, calls: list[dict[str, Any]], content: str = "") -> str:
    """A reply as the template has it."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = chat(form).format.render([message], add_generation_prompt=False)
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("form", TEMPLATES)
def test_what_the_template_writes_is_read_back(form: str) -> None:
    rng = random.Random(0)
    for _ in range(100):
        calls = [random_call(rng) for _ in range(rng.randrange(1, 3))]
        parser = parser_for(form, TOOLS, "c")
        found = [*parser.feed(written(form, calls)), *parser.finish()]
        assert all(isinstance(piece, ToolCall) for piece in found)
        assert [json.loads(piece.arguments) for piece in found if isinstance(piece, ToolCall)] == [
            json.loads(call["function"]["arguments"]) for call in calls
        ]


def test_families_are_known_by_their_templates() -> None:
    for form, template in TEMPLATES.items():
        assert tool_format_of(template) == form
        assert reasoning_of(template) == ("think" if form == "minimax" else "none")
    assert tool_format_of(built_in("chatml").template) == "hermes"
    assert tool_format_of("{{ messages }}") == "hermes"
    assert tool_format_of("<|python_tag|>") == "llama3"


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("form", TEMPLATES)
def test_every_call_extends_the_one_before(form: str, keeps: bool) -> None:
    rng, thinks = random.Random(1), form == "minimax"

    def reply(_: object) -> list[int]:
        text = written(form, [random_call(rng)], rng.choice(["", "Well."]) if thinks else "")
        thought = "Let me see:\n\n{}.\n</think>\n\n" if thinks else ""
        return [*sampled(thought + text.lstrip("\n"), rng), chat(form).stop_ids[0]]

    async def test() -> None:
        async with served(FakeEngine(reply, chunk=4), chat(form)) as up:
            talk: list[Any] = [{"role": "user", "content": "go"}]
            for _ in range(4):
                create = up.of("s").chat.completions.create
                made = (await create(model="m", messages=talk, tools=TOOLS)).choices[0].message
                kept = made.model_dump(exclude_none=True)
                assert bool(kept.get("reasoning_content")) == thinks
                if not keeps:
                    kept.pop("reasoning_content", None)
                (call,) = kept["tool_calls"]
                talk += [kept, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
            for before, after in itertools.pairwise(await up.turns("s")):
                begin = before["prompt_ids"] + before["output_ids"]
                assert after["prompt_ids"][: len(begin)] == begin

    run(test)


def test_a_thought_that_was_cut_is_continued() -> None:
    form = chat("minimax")
    ids = form.tokenizer.encode("on and on")

    async def test() -> None:
        async with served(FakeEngine(lambda _: ids), form) as up:
            talk: list[Any] = [{"role": "user", "content": "go"}]
            create = up.of("s").chat.completions.create
            made = (await create(model="m", messages=talk, max_tokens=4)).choices[0].message
            kept = made.model_dump(exclude_none=True)
            assert kept["content"] == ""
            more = {"role": "system", "content": "go on"}
            await create(model="m", messages=[*talk, kept, more])
            before, after = await up.turns("s")
            begin = before["prompt_ids"] + before["output_ids"]
            assert after["prompt_ids"][: len(begin)] == begin

    run(test)


def test_a_template_that_refuses_what_stands_for_a_reply_is_given_the_reply() -> None:
    refuses = '{% if m.content | length > 9 %}{{ raise_exception("too long") }}{% endif %}'
    form = ChatFormat(template=HEAD + refuses + "{{- m.content }}" + FOOT, end_of_turn="<|im_end|>")

    async def test() -> None:
        short = Chat(tokenizer=PairTokenizer(), format=form)
        async with served(FakeEngine(lambda _: [*b"ok", short.stop_ids[0]]), short) as up:
            talk: list[Any] = [{"role": "user", "content": "go"}]
            create = up.of("s").chat.completions.create
            kept = (await create(model="m", messages=talk)).choices[0].message
            await create(model="m", messages=[*talk, kept.model_dump(), *talk])
            _, after = await up.turns("s")
            assert [reply["rule"] for reply in after["replies"]] == ["not_kept"]
            with pytest.raises(BadRequestError, match="too long"):
                await create(
                    model="m", messages=[*talk, {"role": "user", "content": "far too long"}]
                )

    run(test)
