"""Chat formats: the packaged ones exactly, any other as `transformers` renders it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import UserError
from forge_jax.models.chat import Chat, ChatFormat, TemplateError, built_in
from forge_jax.models.tokenizer import ByteTokenizer

QWEN_LIKE = (Path(__file__).parent / "qwen_like.jinja").read_text()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds <pages> & quotes 'them' — é",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {}}},
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def hop() -> list[dict[str, Any]]:
    messages = [user("Qi")]
    for asked, found in ("il", "lb", "b3"):
        messages += [call("lookup", {"key": asked}), result(found)]
    return [*messages, {"role": "assistant", "content": "!3"}]


def conversation() -> list[dict[str, Any]]:
    """System, thinking before and after the last user turn, two calls at once, two results."""
    both = call("search", {"query": "a < b & 'c' – ü"}, "Looking.")
    both["tool_calls"] += call("stop", {})["tool_calls"]
    return [
        {"role": "system", "content": "Be brief. "},
        user("hi"),
        {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nhello"},
        user("find it"),
        both,
        result('{"found": true}'),
        result("<none>"),
        {"role": "assistant", "content": "done", "reasoning_content": "new thought"},
    ]


def test_a_hop_episode_is_written_exactly() -> None:
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
    text = chat.format.render(hop())
    assert text == "Qi\n?i\n=l\n?l\n=b\n?b\n=3\n!3\n"
    ids = chat.tokenizer.encode(text)
    assert ids == list(text.encode())
    assert chat.tokenizer.decode(ids) == text
    assert chat.stop_ids == (10,)


def test_lookups_of_one_reply_are_one_line() -> None:
    both = call("lookup", {"key": "a"})
    both["tool_calls"] += call("lookup", {"key": "b"})["tool_calls"]
    messages = [user("Wab"), both, result("3"), result("7")]
    assert built_in("lookup").render(messages) == "Wab\n?a\t?b\n=3\n=7\n"


@pytest.mark.parametrize("name", ["lookup", "chatml"])
@pytest.mark.parametrize("messages", [hop(), conversation()], ids=["hop", "conversation"])
def test_packaged_formats_only_append(name: str, messages: list[dict[str, Any]]) -> None:
    """Every prompt of an episode, and what the assistant then writes, begins the next one."""
    form = built_in(name)
    whole = form.render(messages, TOOLS, add_generation_prompt=False)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            assert whole.startswith(form.render(messages[:n], TOOLS))
            turn = form.render(messages[: n + 1], TOOLS, add_generation_prompt=False)
            assert whole.startswith(turn)
            assert turn.rstrip("\n").endswith(form.end_of_turn.strip("\n"))


def test_chatml_is_written_exactly() -> None:
    messages = [user("find é"), *conversation()[4:6]]
    messages[1] = {**messages[1], "tool_calls": messages[1]["tool_calls"][:1]}
    assert built_in("chatml").render(messages, [TOOLS[1]]) == (
        "<|im_start|>system\n# Tools\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "stop", "parameters": {}}}\n</tools>\n\n'
        "Write each call as a JSON object between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nfind é<|im_end|>\n"
        "<|im_start|>assistant\nLooking.\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "a < b & \'c\' – ü"}}\n'
        "</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"found": true}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def reference() -> Any:
    """`transformers` rendering the same template."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)

    def render(template: str, messages: Any, **settings: Any) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **settings
        )

    return render


VARIANTS = [
    {"tools": TOOLS, "add_generation_prompt": True},
    {"tools": TOOLS, "add_generation_prompt": False, "pretty": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "enable_thinking": True},
]


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("upto", [2, 4, 7, 8])
def test_a_template_renders_as_in_transformers(
    reference: Any, settings: dict[str, Any], upto: int
) -> None:
    messages = conversation()[:upto]
    form = ChatFormat(template=QWEN_LIKE, end_of_turn="<|im_end|>")
    ours = form.render(messages, **settings)
    assert ours == reference(QWEN_LIKE, messages, **settings)
    assert "old thought" not in ours or upto < 4
    assert ("new thought" in ours) == (upto == 8)


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y') }}",
        "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ ['<é>'] | tojson(ensure_ascii=true) }}",
        "  {% if true %}\n  a\n  {% endif %}\n b {{- ' c ' -}}  \n\n",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ tools is none }} {{ nothing is defined }} {{ dict(a=1).items() }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}",
    ],
)
def test_the_environment_is_that_of_transformers(reference: Any, template: str) -> None:
    form = ChatFormat(template=template, end_of_turn="\n")
    ours = form.render([user("<hi> & é")])
    assert ours == reference(template, [user("<hi> & é")], add_generation_prompt=True)


def test_arguments_may_be_wire_text_and_content_may_be_parts() -> None:
    form = built_in("chatml")
    objects = [user("ab"), call("search", {"query": "x"}, "")]
    wire = [
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),  # type: ignore[arg-type]
        call("search", json.dumps({"query": "x"}), None),
    ]
    assert form.render(wire) == form.render(objects)
    broken = form.render([user("ab"), call("search", '{"query": ')])
    assert json.dumps('{"query": ') in broken


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages[0].update({'role': 'x'}) }}", "update"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for %}", "line 1"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_fails_names_the_reason(template: str, reason: str) -> None:
    form = ChatFormat(template=template, end_of_turn="\n")
    with pytest.raises(TemplateError, match=reason):
        form.render([user("hi")])


def test_rendering_leaves_messages_as_they_were() -> None:
    messages = conversation()
    messages[4] = call("search", '{"query": "x"}')
    before = json.dumps(messages)
    built_in("chatml").render(messages, TOOLS)
    assert json.dumps(messages) == before


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="chat='alpaca'"):
        built_in("alpaca")
    with pytest.raises(ValueError, match="tool_format='xml'"):
        ChatFormat(template="", end_of_turn="\n", tool_format="xml")
    with pytest.raises(ValueError, match="reasoning='yes'"):
        ChatFormat(template="", end_of_turn="\n", reasoning="yes")
    with pytest.raises(ValueError, match="end_of_turn='ab' is not one token"):
        Chat(tokenizer=ByteTokenizer(), format=ChatFormat(template="", end_of_turn="ab"))
    image = user([{"type": "image_url", "image_url": {}}])  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="image_url"):
        built_in("chatml").render([image])


def test_stop_ids_begin_with_the_end_of_the_turn() -> None:
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"), extra_stop_ids=(256, 258))
    assert chat.stop_ids == (258, 256)
    assert hash(dataclasses.replace(chat.format)) == hash(chat.format)
