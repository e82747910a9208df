"""Calls written as tags, arguments as text: Qwen3-Coder's and MiniMax-M2's.

    <tool_call>                               <minimax:tool_call>
    <function=NAME>                           <invoke name="NAME">
    <parameter=P>
    VALUE                                     <parameter name="P">VALUE</parameter>
    </parameter>
    </function>                               </invoke>
    </tool_call>                              </minimax:tool_call>

A value is any text: it ends before the first closing tag behind which another parameter begins
or the call ends. Values have the types that the tool's schema gives them.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_jax.gateway.parsers.blocks import Before, Block, Start, tag_start
from forge_jax.gateway.parsers.protocol import call_of
from forge_jax.gateway.parsers.typed import Tool, schemas_of, typed


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The words of one format."""

    open: str
    close: str
    call: str  # up to a name
    call_end: str
    parameter: str  # up to a name
    parameter_end: str
    name_end: str
    line: str  # around a value, and not part of it

    @functools.cached_property
    def value_end(self) -> re.Pattern[str]:
        """The end of a value, or of a call that lacks one."""
        parameter, call = re.escape(self.parameter_end), re.escape(self.call_end)
        goes_on = f"{re.escape(self.parameter)}|{call}"
        ends = rf"(?:{parameter}|{call})\s*{re.escape(self.close)}"
        return re.compile(rf"{parameter}\s*(?={goes_on})|(?P<broken>{ends})")


QWEN3_CODER = Tags(
    open="<tool_call>", close="</tool_call>", call="<function=", call_end="</function>",
    parameter="<parameter=", parameter_end="</parameter>", name_end=">", line="\n",
)  # fmt: skip
MINIMAX = Tags(
    open="<minimax:tool_call>", close="</minimax:tool_call>", call='<invoke name="',
    call_end="</invoke>", parameter='<parameter name="', parameter_end="</parameter>",
    name_end='">', line="",
)  # fmt: skip


class _Short(Exception):
    """The text ends before the call does."""


class _Broken(Exception):
    """The text is no call from this place on."""


class Tagged:
    """Blocks of one call or more."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]):
        self._tags = tags
        self._tools = tools

    def start(self, text: str, before: Before, last: bool) -> Start:
        return tag_start(text, self._tags.open, last)

    def read(self, text: str, last: bool) -> Block | None:
        tags = self._tags
        calls: list[tuple[str, str]] = []
        reader = _Reader(text, len(tags.open))
        try:
            while not calls or not reader.takes(tags.close):
                calls.append(self._call(reader))
        except _Short:
            if not last:
                return None
            rest = text[reader.at :]
            if not calls or not tags.close.startswith(rest.strip()):
                return Block(len(text), malformed=True)
            return Block(len(text), tuple(calls))  # its tag is missing at the end of the reply
        except _Broken:
            end = text.find(tags.close, reader.at)
            if end < 0 and not last:
                return None
            return Block(len(text) if end < 0 else end + len(tags.close), malformed=True)
        return Block(reader.at, tuple(calls))

    def _call(self, reader: "_Reader") -> tuple[str, str]:
        tags = self._tags
        if not reader.takes(tags.call):
            raise _Broken
        name = reader.name(tags.name_end)
        schemas, whole = schemas_of(self._tools, name)
        arguments: dict[str, Any] = {}
        while not reader.takes(tags.call_end):
            if not reader.takes(tags.parameter):
                raise _Broken
            key = reader.name(tags.name_end)
            arguments[key] = typed(self._value(reader), schemas.get(key), whole)
        call = call_of(name, arguments)
        if call is None:
            raise _Broken
        return call

    def _value(self, reader: "_Reader") -> str:
        found = self._tags.value_end.search(reader.text, reader.at)
        if found is None:
            raise _Short
        value = reader.text[reader.at : found.start()]
        if found["broken"]:
            reader.at = found.start()
            raise _Broken
        reader.at = found.end()
        return value.removeprefix(self._tags.line).removesuffix(self._tags.line)


class _Reader:
    """A place in a text."""

    def __init__(self, text: str, at: int):
        self.text = text
        self.at = at

    def takes(self, word: str) -> bool:
        """Goes behind `word`, and white space before it, if it stands here.

        Raises _Short where the text ends before that is known.
        """
        begin = self.at
        while begin < len(self.text) and self.text[begin].isspace():
            begin += 1
        if self.text.startswith(word, begin):
            self.at = begin + len(word)
            return True
        if word.startswith(self.text[begin:]):
            raise _Short
        return False

    def name(self, end: str) -> str:
        """A name up to `end` on the same line."""
        stop = self.text.find(end, self.at)
        line = self.text.find("\n", self.at)
        if stop < 0 and line < 0:
            raise _Short
        if stop <= self.at or 0 <= line < stop:
            raise _Broken
        name = self.text[self.at : stop]
        self.at = stop + len(end)
        return name
