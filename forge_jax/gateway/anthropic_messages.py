"""Anthropic's Messages protocol: /v1/messages.

A reply is a list of blocks, text and calls of tools in the order they were written. Token data
goes beside the blocks, never into them: clients send back what they find there.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from forge_jax.drawing import Grammar
from forge_jax.gateway.anthropic_conversation import NO_THREADS, read_conversation
from forge_jax.gateway.ask import MOST_STOPS, MOST_TOKENS, Ask, common_fields
from forge_jax.gateway.call import Call
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import flag, integer, mapping, strings, text, wrong
from forge_jax.gateway.messages import Piece, ToolCall, encoded
from forge_jax.gateway.openai_parts import token_data
from forge_jax.gateway.signing import signature
from forge_jax.gateway.stored import StoredResponses
from forge_jax.gateway.structure import OUTPUT_FORMAT, read_grammar, schema_grammar
from forge_jax.gateway.wire import Context, Wire
from forge_jax.types import Chunk, Finish

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
THINKING = ("enabled", "adaptive")  # kinds of `thinking` that ask for thoughts
# What bodies may say in vLLM's words, beside the protocol's own.
SHARED = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop_token_ids", "logit_bias",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "stream",
    "return_token_ids",
)  # fmt: skip


def parse(body: Mapping[str, Any], _: StoredResponses) -> Ask:
    """What a body asks for. Raises ApiError(400)."""
    shared = common_fields({name: body[name] for name in SHARED if name in body})
    told = {
        "stop": strings(body, "stop_sequences", MOST_STOPS),
        "include_usage": True,
        "answer": _answer(body),
    }
    return Ask(
        source=read_conversation(body),
        max_tokens=integer(body, "max_tokens", 1, MOST_TOKENS),
        logprobs=flag(body, "logprobs"),
        top_logprobs=0,
        tell_thoughts=text(mapping(body, "thinking"), "type", "thinking.") in THINKING,
        **{**shared, **told},
    )


def _answer(body: Mapping[str, Any]) -> Grammar | None:
    """The form of the answer: `output_config.format`, or what vLLM calls it."""
    given = mapping(mapping(body, "output_config"), "format", "output_config.")
    beside = read_grammar(body)
    if not given:
        return beside
    if beside is not None:
        message = f"{OUTPUT_FORMAT} does not go with {beside.source}"
        raise ApiError(400, message, param=OUTPUT_FORMAT)
    kind = text(given, "type", f"{OUTPUT_FORMAT}.")
    if kind != "json_schema":
        raise wrong(f"{OUTPUT_FORMAT}.type", kind, "json_schema")
    if given.get("schema") is None:
        raise wrong(f"{OUTPUT_FORMAT}.schema", None, "a JSON schema")
    return schema_grammar(mapping(given, "schema", f"{OUTPUT_FORMAT}."), OUTPUT_FORMAT)


def answer(context: Context) -> Mapping[str, Any]:
    """The whole answer of a finished call."""
    [completion] = context.call.completions
    blocks: list[dict[str, Any]] = []
    thought = completion.message.thought
    if thought and context.ask.tell_thoughts:
        blocks.append({**_thinking(thought), "signature": signature(thought)})
    told = len(blocks)
    for piece in completion.pieces:
        if isinstance(piece, ToolCall):
            blocks.append({**_tool_use(piece), "input": json.loads(piece.arguments)})
        elif isinstance(piece, str) and len(blocks) > told and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += piece
        elif isinstance(piece, str):
            blocks.append(_text(piece))
    if len(blocks) == told:
        blocks.append(_text(_unsaid(context, completion)))  # clients read a text unasked
    message = {
        **_message(context),
        "content": blocks,
        **_stop(completion),
        "usage": usage_of(context.call, len(completion.output)),
    }
    if context.ask.tell_ids:
        message["prompt_token_ids"] = context.call.prompt.ids.tolist()
    return {**message, **_tokens(context, completion)}


def _message(context: Context) -> dict[str, Any]:
    return {
        "id": f"msg_{context.call.id}",
        "type": "message",
        "role": "assistant",
        "model": context.model,
    }


def _unsaid(context: Context, completion: Completion) -> str:
    """The text of a reply without any: its thought, where that would be told nowhere else."""
    return "" if context.ask.tell_thoughts else completion.message.thought


def _thinking(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": ""}


def _text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _stop(completion: Completion) -> dict[str, Any]:
    """Why a finished completion ended, in Anthropic's words."""
    reason = "end_turn"
    if completion.finish is Finish.LENGTH:
        reason = "max_tokens"
    elif completion.stop_text is not None:
        reason = "stop_sequence"
    elif completion.message.calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": completion.stop_text}


def usage_of(call: Call, sampled: int) -> Mapping[str, int]:
    """Tokens of a call; the prompt is `input_tokens` and what a cache saved together."""
    cached = call.completions[0].cached_tokens
    return {
        "input_tokens": len(call.prompt.ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _tokens(context: Context, completion: Completion) -> dict[str, Any]:
    """What was sampled, as far as it was asked for."""
    told: dict[str, Any] = {}
    if context.ask.tell_ids:
        told |= token_data(completion.output, completion.versions)
    if context.ask.logprobs:
        told["logprobs"] = completion.logprobs.tolist()
    return told


def error_body(error: ApiError) -> Mapping[str, Any]:
    """The JSON object of `error`."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which clients know it
    told: dict[str, Any] = {"type": ERROR_TYPES.get(error.status, kind), "message": message}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {
        "type": "error",
        "error": told,
        "request_id": f"req_{secrets.token_hex(12)}",
    }


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event."""
    return f"event: {kind}\ndata: ".encode() + encoded({"type": kind, **fields}) + b"\n\n"


class MessageStream:
    """Writes the events of a streamed answer."""

    def __init__(self, context: Context):
        self._context = context
        self._begun = False
        self._index = 0  # of the block that is open, or comes next
        self._open = ""  # type of that block, "" if none is
        self._thought = ""  # told so far
        self._answered = False  # something but thoughts was told

    def pieces(self, completion: Completion, chunk: Chunk, pieces: list[Piece]) -> list[bytes]:
        events = [] if self._begun else [self._start()]
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events += self._call(piece)
            elif isinstance(piece, str):
                events += self._said(piece)
            elif self._context.ask.tell_thoughts:
                events += self._think(piece.text)
        if chunk.finish is not None:
            if not self._answered:
                events += self._said(_unsaid(self._context, completion))
            events += [*self._close(), self._delta(completion), event("message_stop")]
        return events

    def end(self) -> list[bytes]:
        return []  # the last piece has told all

    def error(self, error: ApiError) -> list[bytes]:
        return [event("error", **{k: v for k, v in error_body(error).items() if k != "type"})]

    def _start(self) -> bytes:
        self._begun = True
        message = {
            **_message(self._context), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": usage_of(self._context.call, 0),
        }  # fmt: skip
        if self._context.ask.tell_ids:
            message["prompt_token_ids"] = self._context.call.prompt.ids.tolist()
        return event("message_start", message=message)

    def _said(self, piece: str) -> list[bytes]:
        self._answered = True
        return [*self._begin(_text("")), self._told({"type": "text_delta", "text": piece})]

    def _think(self, piece: str) -> list[bytes]:
        self._thought += piece
        delta = {"type": "thinking_delta", "thinking": piece}
        return [*self._begin(_thinking("")), self._told(delta)]

    def _call(self, call: ToolCall) -> list[bytes]:
        self._answered = True
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [*self._close(), *self._begin(_tool_use(call)), self._told(delta), *self._close()]

    def _begin(self, block: Mapping[str, Any]) -> list[bytes]:
        """Opens a block unless one of its type is open."""
        if self._open == block["type"]:
            return []
        events = self._close()
        self._open = block["type"]
        return [*events, event("content_block_start", index=self._index, content_block=block)]

    def _told(self, delta: Mapping[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        """Ends the block that is open, if one is."""
        if not self._open:
            return []
        events = []
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": signature(self._thought)}
            events.append(self._told(delta))
        self._open = ""
        self._index += 1
        return [*events, event("content_block_stop", index=self._index - 1)]

    def _delta(self, completion: Completion) -> bytes:
        usage = usage_of(self._context.call, len(completion.output))
        tokens = _tokens(self._context, completion)
        return event("message_delta", delta=_stop(completion), usage=usage, **tokens)


MESSAGES = Wire(parse=parse, answer=answer, stream=MessageStream, keep_alive=event("ping"))
