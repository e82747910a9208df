"""Parts that OpenAI's two completion protocols share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.gateway.ask import Ask
from forge_jax.gateway.call import Call
from forge_jax.gateway.completion import Completion, Tops
from forge_jax.gateway.errors import ApiError, error_body
from forge_jax.gateway.messages import encoded
from forge_jax.gateway.wire import Context
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.types import Finish

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


def error_events(error: ApiError) -> list[bytes]:
    """A stream's end when something went wrong after its headers were sent."""
    return [event(error_body(error)), DONE]


def last_events(head: Mapping[str, Any], ask: Ask, call: Call) -> list[bytes]:
    """A stream's end: usage, where asked for, in a chunk without choices."""
    if not ask.include_usage:
        return [DONE]
    return [event({**head, "choices": [], "usage": usage_of(call)}), DONE]


def usage_of(call: Call, told: bool = True) -> Mapping[str, Any]:
    """Tokens of a call: its prompt once, all completions if they are told, and what a cache
    saved."""
    prompt = len(call.prompt.ids)
    completions = call.completions if told else ()
    sampled = sum(len(completion.output) for completion in completions)
    thought = sum(completion.thought_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": call.completions[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def finish_reason(completion: Completion) -> str:
    """Why a finished completion ended, in OpenAI's words."""
    if completion.finish is Finish.STOP and completion.message.calls:
        return "tool_calls"
    return str(completion.finish)


def token_data(ids: np.ndarray, versions: np.ndarray) -> Mapping[str, Any]:
    """Sampled tokens and the weight version of each."""
    return {"token_ids": ids.tolist(), "weight_versions": versions.tolist()}


def token_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    """What each id adds to a text it does not begin."""
    return [tokenizer.piece(i, False) for i in ids]


def told_logprobs(
    context: Context, ids: np.ndarray, logprobs: np.ndarray, tops: Tops | None
) -> list[Mapping[str, Any]]:
    """Text, bytes and log-prob of each token, and of those beside it; [] if nobody asked."""
    if not context.ask.logprobs:
        return []

    def told(token: int, logprob: float) -> dict[str, Any]:
        [raw] = token_bytes(context.tokenizer, [token])
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    # An engine that tells none has drawn from nothing: the token stands for all.
    sampled = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    beside = tops or tuple((one,) for one in sampled)
    return [
        {
            **told(*one),
            "top_logprobs": [told(*top) for top in likeliest] if context.ask.top_logprobs else [],
        }
        for one, likeliest in zip(sampled, beside, strict=True)
    ]
