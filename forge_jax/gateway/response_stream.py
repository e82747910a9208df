"""OpenAI's Responses protocol, streamed: an answer as numbered events.

Pieces of a completion flow in, events flow out. Items come one after the other, each is
closed before the next begins, and the last event holds the whole response.
"""

from collections.abc import Mapping
from typing import Any

from forge_jax.gateway.completion import Completion, tops_of
from forge_jax.gateway.errors import ApiError, error_body
from forge_jax.gateway.messages import Piece, ToolCall, encoded
from forge_jax.gateway.openai_parts import told_logprobs
from forge_jax.gateway.responses import (
    answer,
    call_item,
    head,
    message_item,
    parse,
    text_part,
    thought_item,
    thought_part,
)
from forge_jax.gateway.wire import Context, Wire
from forge_jax.types import Chunk, Finish


class ResponseStream:
    """Writes the events of a streamed answer."""

    def __init__(self, context: Context):
        self._context = context
        self._number = 0  # of the next event
        self._index = 0  # of the item that is told, or comes next
        self._words: str | None = None  # of the message or thought that is told; None: none is
        self._thinks = False  # it is a thought
        self._answered = False  # something but thoughts was told
        self._fresh: list[Any] = []  # log-probs that no delta has told
        self._logprobs: list[Any] = []  # of the text so far

    def pieces(self, completion: Completion, chunk: Chunk, pieces: list[Piece]) -> list[bytes]:
        events = [] if self._number else self._begin()
        self._fresh += told_logprobs(self._context, chunk.ids, chunk.logprobs, tops_of(chunk))
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events += self._call(piece)
            else:
                events += self._text(piece) if isinstance(piece, str) else self._think(piece.text)
        if chunk.finish is not None:
            if not self._answered:
                events += self._text("")
            events += self._close("incomplete" if chunk.finish is Finish.LENGTH else "completed")
        return events

    def end(self) -> list[bytes]:
        response = answer(self._context)
        return [self._event(f"response.{response['status']}", response=response)]

    def error(self, error: ApiError) -> list[bytes]:
        told = error_body(error)["error"]
        reason = {"code": told["code"] or told["type"], "message": told["message"]}
        events = [] if self._number else self._begin()
        events.append(self._event("error", **reason, param=told["param"]))
        response = {**head(self._context, "failed"), "error": reason}
        return [*events, self._event("response.failed", response=response)]

    def _begin(self) -> list[bytes]:
        response = head(self._context, "in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def _text(self, piece: str) -> list[bytes]:
        events = []
        if self._words is None or self._thinks:
            events += self._close()
            self._words, self._logprobs, self._answered = "", [], True
            item = message_item(self._context, self._index, None, "in_progress")
            events += [self._item("added", item), self._part("added", text_part(""))]
        assert self._words is not None
        self._words += piece
        fresh, self._fresh = self._fresh, []
        self._logprobs += fresh
        return [*events, self._of("output_text.delta", delta=piece, logprobs=fresh)]

    def _think(self, piece: str) -> list[bytes]:
        events = []
        if self._words is None:
            self._words, self._thinks = "", True
            item = thought_item(self._context, self._index, None, "in_progress")
            events += [self._item("added", item), self._part("added", thought_part(""))]
        self._words += piece
        return [*events, self._of("reasoning_text.delta", delta=piece)]

    def _close(self, status: str = "completed") -> list[bytes]:
        """Ends the message or thought that is told, if one is."""
        if self._words is None:
            return []
        words, self._words = self._words, None
        if self._thinks:
            item = thought_item(self._context, self._index, words, "completed")
            done = self._of("reasoning_text.done", text=words)
        else:
            self._logprobs, self._fresh = self._logprobs + self._fresh, []
            item = message_item(self._context, self._index, words, status, self._logprobs)
            done = self._of("output_text.done", text=words, logprobs=self._logprobs)
        events = [done, self._part("done", item["content"][0]), self._item("done", item)]
        self._thinks = False
        self._index += 1
        return events

    def _call(self, call: ToolCall) -> list[bytes]:
        self._answered = True
        events = self._close()
        begun = call_item(self._context, self._index, call, "", "in_progress")
        item = call_item(self._context, self._index, call, call.arguments, "completed")
        place = {"item_id": item["id"], "output_index": self._index}
        kind = "response.function_call_arguments"
        events += [
            self._item("added", begun),
            self._event(f"{kind}.delta", **place, delta=call.arguments),
            self._event(f"{kind}.done", **place, name=item["name"], arguments=call.arguments),
            self._item("done", item),
        ]
        self._index += 1
        return events

    def _item(self, what: str, item: Mapping[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self._index, item=item)

    def _part(self, what: str, part: Mapping[str, Any]) -> bytes:
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _of(self, what: str, **fields: Any) -> bytes:
        return self._event(f"response.{what}", **self._place(), **fields)

    def _place(self) -> dict[str, Any]:
        kind = thought_item if self._thinks else message_item
        name = kind(self._context, self._index, None, "")["id"]
        return {"item_id": name, "output_index": self._index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encoded(body) + b"\n\n"


RESPONSES = Wire(parse=parse, answer=answer, stream=ResponseStream, told_by_end=True)
