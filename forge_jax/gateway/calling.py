"""Grammars of replies that must, or may, call tools, in the format that the model writes.

Tools and the form of the answer flow in, a grammar flows out. Invariant: what it lets through is
read by the parser of the same format as the calls it was meant to be.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.drawing import GRAMMAR, Grammar
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.messages import Conversation
from forge_jax.gateway.parsers.hermes import CLOSE, OPEN
from forge_jax.gateway.parsers.lookup import first_parameter
from forge_jax.gateway.structure import FORMATS

Tool = Mapping[str, Any]
# As chat templates write arguments.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def reply_grammar(talk: Conversation, answer: Grammar | None, form: str) -> Grammar | None:
    """Of a reply to a request that may offer tools, in the tool format `form`; None: any text.

    A call that is asked for comes in place of the answer of a `response_format`, one that is left
    to the model beside it. Raises ApiError(400) where the two contradict.
    """
    if answer is not None and answer.source not in FORMATS:
        if talk.must_call:
            message = f"{answer.source} does not go with tool_choice, which asks for a call"
            raise ApiError(400, message, param=answer.source)
        return answer
    if talk.must_call:
        rules = ["start: calls", *_calls(talk.must_call, form, talk.parallel)]
        return _grammar(rules, "tool_choice")
    if answer is not None and talk.tools:
        rules = ["start: answer | calls", f"answer: %json {answer.text}"]
        return _grammar([*rules, *_calls(talk.tools, form, talk.parallel)], answer.source)
    if answer is None and form == "hermes" and any(map(_strict, talk.tools)):
        return _grammar(_free(talk.tools), "tools")
    return answer


def _grammar(rules: Sequence[str], source: str) -> Grammar:
    return Grammar(kind=GRAMMAR, text="\n".join(rules), source=source)


def _calls(tools: Sequence[Tool], form: str, parallel: bool) -> list[str]:
    """The rule `calls` of one call or, where `parallel`, more."""
    if form == "lookup":
        function = tools[0]["function"]
        if first_parameter(function) is None:
            message = f"tools: {function['name']!r} takes no parameter to look up"
            raise ApiError(400, message, param="tools")
        return ["calls: /[?][^\\n]+/"]
    more = f" ({_text(chr(10))} call)*" if parallel else ""
    return [f"calls: call{more}", f"call: {_text(OPEN)} body", *_bodies(tools, False)]


def _free(tools: Sequence[Tool]) -> list[str]:
    """Any text, but for what is between the tags of a call."""
    head = ["start: call* TEXT", "TEXT: /(.|\\n)*/", f"head[lazy]: TEXT {_text(OPEN)}"]
    return [*head, "call: head body", *_bodies(tools, True)]


def _bodies(tools: Sequence[Tool], lenient: bool) -> list[str]:
    """The rule `body`: a call of one of `tools` behind its opening tag; where `lenient` arguments
    of tools that are not strict are any object."""
    names = " | ".join(f"tool_{i}" for i in range(len(tools)))
    rules = [f"body: {_text(chr(10))} ({names}) {_text(chr(10) + CLOSE)}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        any_object = lenient and not _strict(tool)
        schema = {} if any_object else function.get("parameters") or {}
        if not isinstance(schema, dict):
            message = f"tools: parameters of {function['name']!r} must be a JSON schema"
            raise ApiError(400, message, param="tools")
        written = json.dumps({"x-guidance": SPACED, **schema, "type": "object"})
        name = json.dumps(function["name"], ensure_ascii=False)
        begin = _text(f'{{"name": {name}, "arguments": ')
        rules += [f"tool_{i}: {begin} arguments_{i} {_text('}')}"]
        rules += [f"arguments_{i}: %json {written}"]
    return rules


def _strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True


def _text(text: str) -> str:
    """`text` as the rules quote it."""
    return json.dumps(text)
