"""Calls written as JSON without tags of their own: Llama 3's and any other model's.

    {"name": NAME, "parameters": {...}}; {...}        also behind <|python_tag|>
    {"name": NAME, "arguments": {...}}                also as a list, and in a fence

An object is a call only where a line begins, or behind a call, and only if it has a name and
arguments; every other JSON text is content.
"""

import re
from typing import Any

from forge_jax.gateway.parsers.blocks import Before, Block, Start
from forge_jax.gateway.parsers.protocol import DECODER, call_of, overlap

PYTHON_TAG, FENCE = "<|python_tag|>", "```"
BETWEEN = " \t\r\n;,"  # two calls
KEYS = ("name", "arguments", "parameters", "type", "id", "function")  # that a call may begin with
# Strings, whole or cut off, and brackets: all that matters for where a value ends.
TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[][{}]', re.DOTALL)
FIRST = re.compile(r'\s*(?:(?P<key>"(?:[^"\\]|\\.)*")\s*:|(?P<other>[^\s"]))', re.DOTALL)
INFO = re.compile(r"```[a-z_]*[ \t]*\r?\n\s*")
MAYBE_INFO = re.compile(r"```[a-z_]*[ \t]*(?:\r?|\r?\n\s*)")


class Bare:
    """Blocks of one JSON value each."""

    def __init__(self, fenced: bool, lists: bool, mark: str = ""):
        """`fenced`: a value may stand in a fence; `lists`: it may be a list of calls; `mark`: may
        stand before it, wherever."""
        self._mark = mark
        words = [re.escape(mark)] if mark else []
        words += [FENCE] if fenced else []
        self._begins = re.compile("|".join([*words, r"[{[]" if lists else r"[{]"]))
        self._held = [word for word in (mark, FENCE if fenced else "") if word]

    def start(self, text: str, before: Before, last: bool) -> Start:
        for found in self._begins.finditer(text):
            at = found.start()
            ahead = text[:at]
            if before.behind and not ahead.strip(BETWEEN):
                return Start(0, at)
            first = ahead.endswith("\n") or (not ahead and before.line)
            if first or (before.blank and not ahead.strip()) or found[0] == self._mark:
                return Start(at, at)
        if last:
            return Start(len(text))
        sure = len(text) - overlap(text, *self._held)
        if before.behind and not text[:sure].strip(BETWEEN):
            return Start(0)
        return Start(sure)

    def read(self, text: str, last: bool) -> Block | None:
        marked = bool(self._mark) and text.startswith(self._mark)
        fenced = text.startswith(FENCE)
        begin = len(self._mark) if marked else 0
        if fenced:
            info = INFO.match(text)
            if info is None or info.end() == len(text):
                return None if not last and MAYBE_INFO.fullmatch(text) else Block(len(FENCE))
            begin = info.end()
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        may_be_call = _may_be_call(text[begin:])
        if may_be_call is False:
            return Block(begin if marked or fenced else begin + 1, malformed=marked)
        end = value_end(text, begin) if may_be_call else None
        if end is None:
            return Block(len(text), malformed=marked or may_be_call is True) if last else None
        if fenced:
            behind = text[end:].lstrip()
            if not last and FENCE.startswith(behind) and behind != FENCE:
                return None
            closed = behind.startswith(FENCE) or (last and FENCE.startswith(behind))
            if not closed:
                return Block(end, malformed=True)
            return _block(text, begin, end, len(text) - len(behind[len(FENCE) :]), marked)
        return _block(text, begin, end, end, marked)


def _may_be_call(text: str) -> bool | None:
    """Whether JSON that begins so may be a call or a list of them; None: not to be known yet."""
    if text.startswith("["):
        text = text[1:].lstrip()
    if not text:
        return None
    if text[0] != "{":
        return False
    first = FIRST.match(text, 1)
    if first is None:
        return None
    return first["key"] is not None and first["key"][1:-1] in KEYS


def value_end(text: str, begin: int) -> int | None:
    """Where the brackets that open at `begin` are closed; None where they are not."""
    depth = 0
    for token in TOKENS.finditer(text, begin):
        if token[0] in ("{", "["):
            depth += 1
        elif token[0] in ("}", "]"):
            depth -= 1
            if depth == 0:
                return token.end()
    return None


def _block(text: str, begin: int, end: int, behind: int, marked: bool) -> Block:
    """The calls of the value text[begin:end], which with all around it ends at `behind`."""
    try:
        value = DECODER.decode(text[begin:end])
    except (ValueError, RecursionError):
        return Block(behind, malformed=True)
    entries = [_entry(one) for one in (value if isinstance(value, list) else [value])]
    calls = [call_of(*entry) if entry else None for entry in entries]
    if calls and all(calls):
        return Block(behind, tuple(call for call in calls if call))
    return Block(behind, malformed=marked or any(entry is not None for entry in entries))


def _entry(value: Any) -> tuple[Any, Any] | None:
    """Name and arguments of an object that means to be a call."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):  # as OpenAI's clients write it
        value = value["function"]
    for key in ("arguments", "parameters"):
        if "name" in value and key in value:
            return value["name"], value[key]
    return None
