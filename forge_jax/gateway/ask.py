"""What a client asks for, the same whatever protocol it speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_jax.gateway.fields import flag, integer, mapping, number, strings, token_ids
from forge_jax.gateway.messages import Conversation

MOST_CHOICES = 128
MOST_STOPS = 16
# Truncation and penalties would make the sampler another policy than the one trained:
# the whole distribution is sampled, and the answer's headers say what was not applied.
NOT_APPLIED = (
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "min_tokens",
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_tokens": (0,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: what to continue, how to draw, what to tell."""

    source: Conversation | str | tuple[int, ...]  # messages, text, or token ids
    n: int
    temperature: float | None  # None: the session's
    seed: int | None  # None: from the session's
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]  # beside the chat's own
    ignore_eos: bool
    stream: bool
    include_usage: bool  # a stream ends with a chunk of usage
    logprobs: bool
    top_logprobs: bool  # the sampled token stands for the most likely ones
    tell_ids: bool  # token ids and weight versions
    not_applied: tuple[str, ...]


def common_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Ask` that both of OpenAI's completion protocols spell alike."""
    options = mapping(body, "stream_options")
    return {
        "n": integer(body, "n", 1, MOST_CHOICES) or 1,
        "temperature": number(body, "temperature", 0.0),
        "seed": integer(body, "seed", -(2**63), 2**64 - 1),
        "stop": strings(body, "stop", MOST_STOPS),
        "stop_ids": token_ids(body, "stop_token_ids"),
        "ignore_eos": flag(body, "ignore_eos"),
        "stream": flag(body, "stream"),
        "include_usage": flag(options, "include_usage", "stream_options."),
        "tell_ids": flag(body, "return_token_ids"),
        "not_applied": tuple(
            name
            for name in NOT_APPLIED
            if body.get(name) is not None and body[name] not in NEUTRAL[name]
        ),
    }
