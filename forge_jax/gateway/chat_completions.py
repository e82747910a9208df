"""OpenAI's Chat Completions protocol: /v1/chat/completions.

Token data goes beside the message, never into it: clients send back what they find
in a message.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_jax.gateway.ask import Ask, common_fields
from forge_jax.gateway.chat_messages import read_conversation
from forge_jax.gateway.completion import Completion, Tops, tops_of
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import flag, integer
from forge_jax.gateway.messages import Piece, Thought
from forge_jax.gateway.openai_parts import (
    error_events,
    event,
    finish_reason,
    last_events,
    token_data,
    told_logprobs,
    usage_of,
)
from forge_jax.gateway.prompt_logprobs import by_token
from forge_jax.gateway.stored import StoredResponses
from forge_jax.gateway.wire import Context, Wire
from forge_jax.types import Chunk

MOST_TOKENS = 2**31 - 1


def parse(body: Mapping[str, Any], _: StoredResponses) -> Ask:
    """What a body asks for. Raises ApiError(400)."""
    most = integer(body, "max_completion_tokens", 1, MOST_TOKENS)
    older = integer(body, "max_tokens", 1, MOST_TOKENS)
    return Ask(
        source=read_conversation(body),
        max_tokens=older if most is None else most,
        logprobs=flag(body, "logprobs"),
        top_logprobs=integer(body, "top_logprobs", 0, 20) or 0,
        **common_fields(body),
    )


def answer(context: Context) -> Mapping[str, Any]:
    """The whole answer of a finished call."""
    body = {
        **_head(context, "chat.completion"),
        "choices": [_choice(context, c) for c in context.call.completions],
        "usage": usage_of(context.call),
    }
    if context.ask.tell_ids:
        body["prompt_token_ids"] = context.call.prompt.ids.tolist()
    top = context.ask.prompt_logprobs
    if top is not None:
        body["prompt_logprobs"] = by_token(context.call, context.tokenizer, top)
    return body


def _head(context: Context, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{context.call.id}",
        "object": kind,
        "created": context.created,
        "model": context.model,
    }


def _choice(context: Context, completion: Completion) -> dict[str, Any]:
    told = completion.message
    message: dict[str, Any] = {"role": "assistant", "content": told.content, "refusal": None}
    if told.thought:
        message["reasoning_content"] = told.thought
    if told.calls:
        message["content"] = told.content or None
        message["tool_calls"] = [call.wire() for call in told.calls]
    choice: dict[str, Any] = {
        "index": completion.place[1],
        "message": message,
        "logprobs": _logprobs(context, completion.output, completion.logprobs, completion.tops),
        "finish_reason": finish_reason(completion),
    }
    if context.ask.tell_ids:
        choice |= token_data(completion.output, completion.versions)
    return choice


def _logprobs(
    context: Context, ids: np.ndarray, logprobs: np.ndarray, tops: Tops | None
) -> Mapping[str, Any] | None:
    if not context.ask.logprobs:
        return None
    return {"content": told_logprobs(context, ids, logprobs, tops), "refusal": None}


class ChatStream:
    """Writes the chunks of a streamed answer."""

    def __init__(self, context: Context):
        self._context = context
        self._head = _head(context, "chat.completion.chunk")
        if context.ask.include_usage:
            self._head["usage"] = None
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}  # choice -> tool calls told

    def pieces(self, completion: Completion, chunk: Chunk, pieces: list[Piece]) -> list[bytes]:
        index = completion.place[1]
        extra: dict[str, Any] = {}
        if self._context.ask.logprobs and len(chunk.ids):
            extra["logprobs"] = _logprobs(self._context, chunk.ids, chunk.logprobs, tops_of(chunk))
        if self._context.ask.tell_ids and len(chunk.ids):
            extra |= token_data(chunk.ids, chunk.versions)
        events = []
        if index not in self._begun:
            self._begun.add(index)
            first = {"role": "assistant", "content": "", "refusal": None}
            events.append(self._event(index, first, prompt=True))
        deltas = [self._delta(index, piece) for piece in pieces]
        if extra and not deltas:
            deltas = [{}]
        for delta in deltas:
            events.append(self._event(index, delta, extra))
            extra = {}
        if chunk.finish is not None:
            events.append(self._event(index, {}, finish=finish_reason(completion)))
        return events

    def end(self) -> list[bytes]:
        return last_events(self._head, self._context.ask, self._context.call)

    def error(self, error: ApiError) -> list[bytes]:
        return error_events(error)

    def _delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
        index = self._calls.get(choice, 0)
        self._calls[choice] = index + 1
        return {"tool_calls": [{"index": index, **piece.wire()}]}

    def _event(
        self,
        index: int,
        delta: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        finish: str | None = None,
        prompt: bool = False,
    ) -> bytes:
        choice = {
            "index": index, "delta": delta, "logprobs": None, **(extra or {}),
            "finish_reason": finish,
        }  # fmt: skip
        body = {**self._head, "choices": [choice]}
        if prompt and self._context.ask.tell_ids:
            body["prompt_token_ids"] = self._context.call.prompt.ids.tolist()
        return event(body)


CHAT_COMPLETIONS = Wire(parse=parse, answer=answer, stream=ChatStream)
