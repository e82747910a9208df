"""A line ``?VALUE``: a call of the first tool with VALUE as its first parameter."""

from collections.abc import Mapping
from typing import Any

from forge_jax.gateway.messages import Piece, ToolCall, compact


class LookupParser:
    """The call of one reply; a reply that does not begin with a question mark is content."""

    def __init__(self, function: Mapping[str, Any], prefix: str):
        self.malformed = 0
        self._name: str = function["name"]
        self._parameter = first_parameter(function)
        self._prefix = prefix
        self._text: str | None = ""  # None: the reply is content

    def feed(self, text: str) -> list[Piece]:
        if self._text is None:
            return [text] if text else []
        self._text += text
        if not self._text or (self._text[0] == "?" and self._parameter is not None):
            return []
        content, self._text = self._text, None
        return [content]

    def finish(self) -> list[Piece]:
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
