"""Messages to the text a model was trained on: chat templates, in a sandbox.

Messages in the OpenAI shape flow in, the prompt flows out as text. A template is
untrusted code, so it runs where it can change nothing.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forge_jax.config import UserError, check
from forge_jax.models.tokenizer import Tokenizer

TOOL_FORMATS = ("hermes", "qwen3_coder", "llama3", "minimax", "json", "lookup")
REASONING_FORMATS = ("none", "think")
# What templates have in common whose models write calls so; the first that fits.
SPELLED = (
    ("minimax:tool_call", "minimax"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)
BUILT_IN = {"chatml": ("<|im_end|>", "hermes"), "lookup": ("\n", "lookup")}
# What rendering raises on messages that a template cannot write.
REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


class TemplateError(UserError):
    """A template refuses these messages, or is itself broken."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a conversation is written as text, and how the model writes tool calls."""

    template: str  # Jinja2
    end_of_turn: str  # text of the token that closes an assistant turn
    tool_format: str = "hermes"  # one of TOOL_FORMATS
    reasoning: str = "none"  # "think": a reply may begin with <think>...</think>
    bos_token: str = ""  # variables that templates may use
    eos_token: str = ""

    def __post_init__(self) -> None:
        check(
            self.tool_format in TOOL_FORMATS,
            f"tool_format={self.tool_format!r} must be one of {TOOL_FORMATS}",
        )
        check(
            self.reasoning in REASONING_FORMATS,
            f"reasoning={self.reasoning!r} must be one of {REASONING_FORMATS}",
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, up to where the assistant begins to write.

        `variables` are the template's own switches (`enable_thinking=False`). Arguments of
        tool calls may be objects or, as on the wire, JSON text. Raises TemplateError.
        """
        template = compiled(self.template)
        try:
            return template.render(
                messages=[_plain(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                **variables,
            )
        except TemplateError:
            raise
        except REFUSALS as error:
            raise TemplateError(f"chat template: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer and a format that belong together."""

    tokenizer: Tokenizer
    format: ChatFormat
    extra_stop_ids: tuple[int, ...] = ()  # ids that also end a completion

    def __post_init__(self) -> None:
        ids = self.tokenizer.encode(self.format.end_of_turn)
        check(len(ids) == 1, f"end_of_turn={self.format.end_of_turn!r} is not one token: {ids}")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, the one that closes a turn first."""
        own = self.tokenizer.encode(self.format.end_of_turn)[0]
        return (own, *(i for i in self.extra_stop_ids if i != own))


def built_in(name: str) -> ChatFormat:
    """The packaged format `name`: "chatml" or "lookup". Raises UserError on another."""
    if name not in BUILT_IN:
        raise UserError(f"chat={name!r} must be one of {', '.join(BUILT_IN)}")
    end_of_turn, tool_format = BUILT_IN[name]
    template = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatFormat(template=template, end_of_turn=end_of_turn, tool_format=tool_format)


def tool_format_of(template: str) -> str:
    """How the model behind a template writes tool calls: as the template writes them."""
    found = (form for words, form in SPELLED if words in template)
    return next(found, "hermes")


def reasoning_of(template: str) -> str:
    """How the model behind a template reasons: as the template writes it."""
    return "think" if "</think>" in template else "none"


@functools.lru_cache(maxsize=64)
def compiled(template: str) -> jinja2.Template:
    """`template`, ready to render. Raises TemplateError on bad syntax."""
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """`{% generation %}`, with which templates mark assistant text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(f"chat template: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects."""
    plain = {**message, "content": _content(message.get("content"))}
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] != "text":
            raise TemplateError(f"content part of type {part['type']!r}: only text is supported")
    return "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = arguments  # the model's own malformed call, shown to it as it was
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}
