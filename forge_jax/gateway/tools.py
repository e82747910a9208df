"""Tool calls in the text a model writes, found as the text arrives.

Text flows in piece by piece, content and tool calls flow out in order. How the text
was cut into pieces changes only when something comes out, never what. A call that is
not well-formed is content: a parser never raises on what a model wrote, and never
swallows it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_jax.gateway.messages import ToolCall, compact

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolParser(Protocol):
    """Finds the tool calls of one reply."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Takes the next text; gives what is now certain."""
        ...

    def finish(self) -> list[str | ToolCall]:
        """Ends the reply; gives the rest."""
        ...


def parser_for(form: str, tools: Sequence[Mapping[str, Any]], prefix: str) -> ToolParser:
    """The parser of a tool format for a reply to a request that offers `tools`.

    `prefix` begins the ids of the calls found. Without tools all text is content.
    """
    if not tools:
        return PlainText()
    if form == "hermes":
        return HermesParser(prefix)
    if form == "lookup":
        return LookupParser(tools[0]["function"], prefix)
    raise NotImplementedError(f"tool_format={form!r}")


class PlainText:
    """No tools: every text is content at once."""

    def feed(self, text: str) -> list[str | ToolCall]:
        return [text] if text else []

    def finish(self) -> list[str | ToolCall]:
        return []


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

    White space beside a call is not content; a reply without calls is left as it is.
    """

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._text = ""  # not yet decided
        self._inside = False  # behind an opening tag
        self._tried = 0  # closing tags in the text when it last failed to parse
        self._space = ""  # white space that is content only if content follows
        self._said = False
        self._count = 0
        self._out: list[str | ToolCall] = []

    def feed(self, text: str) -> list[str | ToolCall]:
        self._text += text
        while self._step(last=False):
            pass
        return self._take()

    def finish(self) -> list[str | ToolCall]:
        while self._step(last=True):
            pass
        if self._count == 0 and self._space:
            self._out.append(self._space)
        return self._take()

    def _take(self) -> list[str | ToolCall]:
        out, self._out = self._out, []
        return out

    def _step(self, last: bool) -> bool:
        """Decides one piece of the text; False where nothing more can be decided."""
        return self._call(last) if self._inside else self._outside(last)

    def _outside(self, last: bool) -> bool:
        before, tag, behind = self._text.partition(OPEN)
        if tag:
            self._content(before)
            self._text, self._inside, self._tried = behind, True, 0
            return True
        held = 0 if last else overlap(self._text, OPEN)
        self._content(self._text[: len(self._text) - held])
        self._text = self._text[len(self._text) - held :]
        return False

    def _call(self, last: bool) -> bool:
        closed = self._text.count(CLOSE)
        if not last and closed <= self._tried:
            return False
        end = json_end(self._text)
        rest = "" if end is None else self._text[end:].lstrip()
        if not last and (end is None or (CLOSE.startswith(rest) and rest != CLOSE)):
            # The tag seen is part of a string that goes on, or of one behind which the
            # call's own tag has begun.
            self._tried = closed
            return False
        call = None
        if end is not None and (rest.startswith(CLOSE) or (last and CLOSE.startswith(rest))):
            call = hermes_call(self._text[:end], f"{self._prefix}_{self._count}")
        self._inside = False
        if call is None:
            text, tag, self._text = self._text.partition(CLOSE)
            self._content(OPEN + text + tag)
        else:
            self._out.append(call)
            self._count += 1
            self._text = rest[len(CLOSE) :]
        return True

    def _content(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if self._count and not self._said:
            body = body.lstrip()
        if body:
            self._said = True
            self._out.append(body)


class LookupParser:
    """A line ``?VALUE``: a call of the first tool with VALUE as its first parameter."""

    def __init__(self, function: Mapping[str, Any], prefix: str):
        self._name: str = function["name"]
        self._parameter = first_parameter(function)
        self._prefix = prefix
        self._text: str | None = ""  # None: the reply is content

    def feed(self, text: str) -> list[str | ToolCall]:
        if self._text is None:
            return [text] if text else []
        self._text += text
        if not self._text or (self._text[0] == "?" and self._parameter is not None):
            return []
        content, self._text = self._text, None
        return [content]

    def finish(self) -> list[str | ToolCall]:
        if not self._text:
            return []
        line, _, rest = self._text.partition("\n")
        arguments = compact({self._parameter: line[1:]})
        call = ToolCall(id=f"{self._prefix}_0", name=self._name, arguments=arguments)
        return [call, rest] if rest else [call]


def first_parameter(function: Mapping[str, Any]) -> str | None:
    """Name of the first parameter of a function's schema, None if it takes none."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return next(iter(properties), None) if isinstance(properties, dict) else None


def hermes_call(text: str, identifier: str) -> ToolCall | None:
    """The call that the JSON `text` describes, None if it describes none."""
    try:
        value = _DECODER.decode(text)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return ToolCall(id=identifier, name=name, arguments=compact(arguments))
    except (ValueError, RecursionError):
        return None


def json_end(text: str) -> int | None:
    """Where the JSON value that begins `text` ends, None if it does not end there."""
    start = len(text) - len(text.lstrip())
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def overlap(text: str, *wanted: str) -> int:
    """Length of the longest end of `text` that begins one of `wanted` without being it."""
    most = max((len(word) - 1 for word in wanted), default=0)
    for size in range(min(most, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(word) > size and word.startswith(tail) for word in wanted):
            return size
    return 0


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    # An infinity could not be written as JSON again.
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
