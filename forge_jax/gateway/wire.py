"""What a wire protocol is to the core: three pure functions and no state.

A body flows in through `parse`; a finished call flows out through `answer`, a running
one through what `stream` makes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forge_jax.gateway.ask import Ask
from forge_jax.gateway.call import Call
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.exchange import COMMENT
from forge_jax.gateway.messages import Piece
from forge_jax.gateway.stored import StoredResponses
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.types import Chunk


@dataclass(frozen=True, kw_only=True)
class Context:
    """What answers are written from."""

    ask: Ask
    call: Call
    model: str
    created: int  # unix time
    tokenizer: Tokenizer


class StreamWriter(Protocol):
    """Writes the events of one streamed answer."""

    def pieces(self, completion: Completion, chunk: Chunk, pieces: list[Piece]) -> list[bytes]:
        """Events for newly read pieces of one completion."""
        ...

    def end(self) -> list[bytes]:
        """Events after the last completion has ended."""
        ...

    def error(self, error: ApiError) -> list[bytes]:
        """Events that end the stream with an error."""
        ...


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One protocol."""

    # A body, and what the session stores for later calls to refer to. Raises ApiError(400, 404).
    parse: Callable[[Mapping[str, Any], StoredResponses], Ask]
    answer: Callable[[Context], Mapping[str, Any]]
    stream: Callable[[Context], StreamWriter]
    keep_alive: bytes = COMMENT  # what a silent stream sends
    told_by_end: bool = False  # a stream is whole to its client only with the events of its `end`
