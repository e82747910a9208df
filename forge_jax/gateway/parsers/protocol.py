"""What a parser of replies is, and what the parsers of tool formats share.

Text flows in piece by piece, content and tool calls flow out in order. How the text was cut
into pieces changes only when something comes out, never what. A call that is not well-formed is
content and is counted: a parser never raises on what a model wrote, and never swallows it.
"""

import json
import sys
from typing import Any, Protocol

from forge_jax.gateway.messages import Piece, compact


class ReplyParser(Protocol):
    """Finds the parts of one reply."""

    @property
    def malformed(self) -> int:
        """Calls so far that had to stay text."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Takes the next text; gives what is now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Ends the reply; gives the rest."""
        ...


class PlainText:
    """No tools: every text is content at once."""

    malformed = 0

    def feed(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


def overlap(text: str, *wanted: str) -> int:
    """Length of the longest end of `text` that begins one of `wanted` without being it."""
    most = max((len(word) - 1 for word in wanted), default=0)
    for size in range(min(most, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(word) > size and word.startswith(tail) for word in wanted):
            return size
    return 0


def call_of(name: Any, arguments: Any) -> tuple[str, str] | None:
    """Name and JSON text of a call, None where they are none."""
    try:
        if isinstance(arguments, str):
            arguments = DECODER.decode(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return name, compact(arguments)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    # An infinity could not be written as JSON again.
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
