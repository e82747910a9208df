"""The parser of a reply: of the model's tool format, behind that of its reasoning.

The chat's format and a request flow in, a parser flows out.
"""

from collections.abc import Sequence

from forge_jax.gateway.messages import Conversation
from forge_jax.gateway.parsers.bare import PYTHON_TAG, Bare
from forge_jax.gateway.parsers.blocks import BlockParser, Format
from forge_jax.gateway.parsers.hermes import Hermes
from forge_jax.gateway.parsers.lookup import LookupParser
from forge_jax.gateway.parsers.protocol import PlainText, ReplyParser
from forge_jax.gateway.parsers.tagged import MINIMAX, QWEN3_CODER, Tagged
from forge_jax.gateway.parsers.thoughts import ThoughtParser, opens_thought
from forge_jax.gateway.parsers.typed import Tool
from forge_jax.models.chat import ChatFormat


def reply_parser(form: ChatFormat, talk: Conversation, prompt: str, prefix: str) -> ReplyParser:
    """The parser of a reply to `talk`, written as the text `prompt`.

    `prefix` begins the ids of the calls found.
    """
    inner = parser_for(form.tool_format, talk.must_call or talk.tools, prefix)
    if form.reasoning == "none":
        return inner
    return ThoughtParser(inner, opens_thought(prompt))


def parser_for(form: str, tools: Sequence[Tool], prefix: str) -> ReplyParser:
    """The parser of a tool format for a reply to a request that offers `tools`.

    Without tools all text is content.
    """
    if not tools:
        return PlainText()
    if form == "lookup":
        return LookupParser(tools, prefix)
    return BlockParser(format_of(form, tools), prefix)


def format_of(form: str, tools: Sequence[Tool]) -> Format:
    """How calls of a tool format are found, but for those of `lookup`."""
    match form:
        case "hermes":
            return Hermes()
        case "qwen3_coder":
            return Tagged(QWEN3_CODER, tools)
        case "minimax":
            return Tagged(MINIMAX, tools)
        case "llama3":
            return Bare(fenced=False, lists=False, mark=PYTHON_TAG)
        case "json":
            return Bare(fenced=True, lists=True)
    raise NotImplementedError(f"tool_format={form!r}")
