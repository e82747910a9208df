"""OpenAI's older Completions protocol: /v1/completions, text or token ids in.

Token ids come back as vLLM tells them, with the weight version of each token beside.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.gateway.ask import Ask, common_fields
from forge_jax.gateway.completion import Completion, Tops, tops_of
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import flag, integer, token_ids, wrong
from forge_jax.gateway.messages import Piece
from forge_jax.gateway.openai_parts import (
    error_events,
    event,
    finish_reason,
    last_events,
    token_bytes,
    token_data,
    usage_of,
)
from forge_jax.gateway.prompt_logprobs import by_token, echoed
from forge_jax.gateway.stored import StoredResponses
from forge_jax.gateway.wire import Context, Wire
from forge_jax.types import Chunk

DEFAULT_TOKENS = 16  # of the protocol
MOST_TOKENS = 2**31 - 1


def parse(body: Mapping[str, Any], _: StoredResponses) -> Ask:
    """What a body asks for. Raises ApiError(400)."""
    if body.get("suffix"):
        raise ApiError(400, "suffix is not supported", param="suffix")
    echo = flag(body, "echo")
    most = integer(body, "max_tokens", 0 if echo else 1, MOST_TOKENS)
    told = body.get("logprobs")
    if isinstance(told, bool):
        logprobs, top = told, 0
    else:
        count = integer(body, "logprobs", 0, 20)
        logprobs, top = count is not None, count or 0
    if echo and flag(body, "stream") and (logprobs or most == 0):
        raise wrong("stream", True, "false where the prompt is echoed with logprobs or alone")
    return Ask(
        source=_prompt(body),
        max_tokens=DEFAULT_TOKENS if most is None else most,
        echo=echo,
        logprobs=logprobs,
        top_logprobs=top,
        **common_fields(body),
    )


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list):
        return token_ids({"prompt": prompt}, "prompt")
    raise wrong("prompt", prompt, "one text or one list of token ids, not empty")


def answer(context: Context) -> Mapping[str, Any]:
    """The whole answer of a finished call."""
    return {
        **_head(context),
        "choices": [_whole(context, c) for c in context.call.completions],
        "usage": usage_of(context.call, not context.ask.echo_only),
    }


def _head(context: Context) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.call.id}",
        "object": "text_completion",
        "created": context.created,
        "model": context.model,
    }


def _whole(context: Context, completion: Completion) -> dict[str, Any]:
    ask, call = context.ask, context.call
    before = call.prompt.text if ask.echo else ""
    count = 0 if ask.echo_only else len(completion.output)
    output, logprobs = completion.output[:count], completion.logprobs[:count]
    tops = None if completion.tops is None else completion.tops[:count]
    told = _logprobs(context, output, logprobs, tops, len(before))
    choice: dict[str, Any] = {
        "index": completion.place[1],
        "text": before + ("" if ask.echo_only else completion.message.content),
        "logprobs": _with_prompt(context, told) if ask.echo and told else told,
        "finish_reason": "length" if ask.echo_only else finish_reason(completion),
    }
    if ask.tell_ids:
        choice |= token_data(output, completion.versions[:count])
        choice["prompt_token_ids"] = call.prompt.ids.tolist()
    if ask.prompt_logprobs is not None:
        choice["prompt_logprobs"] = by_token(call, context.tokenizer, ask.prompt_logprobs)
    return choice


def _with_prompt(context: Context, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """The log-probs of a completion, behind those of its prompt."""
    prompt = echoed(context.call, context.tokenizer, context.ask.top_logprobs)
    prompt["text_offset"] = _offsets(prompt["tokens"], 0)
    return {name: told[name] if told[name] is None else prompt[name] + told[name] for name in told}


def _logprobs(
    context: Context, ids: np.ndarray, logprobs: np.ndarray, tops: Tops | None, offset: int
) -> Mapping[str, Any] | None:
    if not context.ask.logprobs:
        return None

    def texts(ids: list[int]) -> list[str]:
        return [raw.decode("utf-8", "replace") for raw in token_bytes(context.tokenizer, ids)]

    tokens, told = texts(ids.tolist()), logprobs.tolist()
    # An engine that tells none has drawn from nothing: the token stands for all.
    top = [{token: logprob} for token, logprob in zip(tokens, told, strict=True)]
    if tops is not None:
        top = [
            dict(zip(texts([i for i, _ in one]), [x for _, x in one], strict=True)) for one in tops
        ]
    return {
        "tokens": tokens,
        "token_logprobs": told,
        "top_logprobs": top if context.ask.top_logprobs else None,
        "text_offset": _offsets(tokens, offset),
    }


def _offsets(tokens: Sequence[str], offset: int) -> list[int]:
    starts = np.cumsum([offset, *map(len, tokens)])
    return starts[:-1].tolist()


class CompletionStream:
    """Writes the chunks of a streamed answer."""

    def __init__(self, context: Context):
        self._context = context
        self._head = _head(context)
        if context.ask.include_usage:
            self._head["usage"] = None
        self._offsets: dict[int, int] = {}  # choice -> characters told

    def pieces(self, completion: Completion, chunk: Chunk, pieces: list[Piece]) -> list[bytes]:
        index, text = completion.place[1], "".join(p for p in pieces if isinstance(p, str))
        told = self._context.ask.tell_ids or self._context.ask.logprobs
        if not text and chunk.finish is None and not (told and len(chunk.ids)):
            return []
        if index not in self._offsets and self._context.ask.echo:
            text = self._context.call.prompt.text + text
        offset = self._offsets.get(index, 0)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(self._context, chunk.ids, chunk.logprobs, tops_of(chunk), offset),
            "finish_reason": None if chunk.finish is None else finish_reason(completion),
        }
        if self._context.ask.tell_ids:
            choice |= token_data(chunk.ids, chunk.versions)
            if index not in self._offsets:
                choice["prompt_token_ids"] = self._context.call.prompt.ids.tolist()
        self._offsets[index] = offset + len(text)
        return [event({**self._head, "choices": [choice]})]

    def end(self) -> list[bytes]:
        return last_events(self._head, self._context.ask, self._context.call)

    def error(self, error: ApiError) -> list[bytes]:
        return error_events(error)


COMPLETIONS = Wire(parse=parse, answer=answer, stream=CompletionStream)
