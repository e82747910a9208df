"""A line ``?VALUE``: a call of the one tool with VALUE as its first parameter.

Where several tools are offered the line is ``?NAME VALUE VALUE``, values in the order of the
parameters; the last parameter takes the rest of the line. Several calls of one reply have a tab
between them: ``?VALUE<tab>?VALUE``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.messages import Piece, ToolCall, compact
from forge_jax.gateway.parsers.typed import Tool, schemas_of, typed

BETWEEN = "\t"  # calls of one line


class LookupParser:
    """The calls of one reply; a reply that does not begin with a question mark is content."""

    def __init__(self, tools: Sequence[Tool], prefix: str):
        self.malformed = 0
        self._tools = tools
        self._prefix = prefix
        self._parameter = first_parameter(tools[0]["function"])  # of the only tool
        self._callable = len(tools) > 1 or self._parameter is not None
        self._text: str | None = ""  # None: the reply is content

    def feed(self, text: str) -> list[Piece]:
        if self._text is None:
            return [text] if text else []
        self._text += text
        if not self._text or (self._text[0] == "?" and self._callable):
            return []
        content, self._text = self._text, None
        return [content]

    def finish(self) -> list[Piece]:
        if not self._text:
            return []
        line, _, rest = self._text.partition("\n")
        read = [self._read(one) for one in line[1:].split(f"{BETWEEN}?")]
        nameless = sum(not name for name, _ in read)
        if nameless:
            self.malformed += nameless
            return [self._text]
        calls = [
            ToolCall(id=f"{self._prefix}_{number}", name=name, arguments=compact(arguments))
            for number, (name, arguments) in enumerate(read)
        ]
        return [*calls, rest] if rest else [*calls]

    def _read(self, line: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call; of a tool that is not offered, no arguments."""
        if len(self._tools) == 1 and self._parameter is not None:
            return self._tools[0]["function"]["name"], {self._parameter: line}
        name, _, values = line.partition(" ")
        schemas, whole = schemas_of(self._tools, name)
        texts = values.split(" ", max(len(schemas) - 1, 0)) if values else []
        pairs = zip(schemas.items(), texts, strict=False)
        return name, {key: typed(text, schema, whole) for (key, schema), text in pairs}


def first_parameter(function: Mapping[str, Any]) -> str | None:
    """Name of the first parameter of a function's schema, None if it takes none."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return next(iter(properties), None) if isinstance(properties, dict) else None
