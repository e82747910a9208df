"""What a client asks for, the same whatever protocol it speaks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_jax.drawing import COLDEST, Grammar
from forge_jax.gateway.fields import flag, integer, mapping, number, strings, token_ids, wrong
from forge_jax.gateway.messages import Conversation
from forge_jax.gateway.stored import Given
from forge_jax.gateway.structure import read_grammar

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOKENS = 2**31 - 1


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
    top_logprobs: int  # likeliest tokens to tell beside each sampled one
    prompt_logprobs: int | None  # ... beside each token of the prompt; None: nothing is told
    echo: bool = False  # the prompt comes before the completion
    tell_ids: bool  # token ids and weight versions
    shaping: Mapping[str, Any]  # what else `Sampling` is to have
    answer: Grammar | None  # that the answer belongs to, where it is no tool call
    told: Mapping[str, Any] = field(default_factory=dict)  # that the answer says of the request
    # Namespace and name of functions, by the names that the model sees.
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tell_thoughts: bool = True  # the reasoning before an answer
    seal_thoughts: bool = False  # and an opaque copy of it, to be handed back
    given: Given | None = None  # what later calls may refer to with the answer; None: nothing

    @property
    def echo_only(self) -> bool:
        """Nothing that is sampled is told."""
        return self.max_tokens == 0

    @property
    def prompt_tops(self) -> int | None:
        """Likeliest tokens that the engine has to tell beside each token of the prompt."""
        if self.echo and self.logprobs:
            return max(self.top_logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs


def common_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Ask` that protocols spell alike."""
    options = mapping(body, "stream_options")
    prompt_logprobs = integer(body, "prompt_logprobs", 0, MOST_TOKENS)
    if prompt_logprobs is not None and flag(body, "stream"):
        raise wrong("prompt_logprobs", prompt_logprobs, "null where stream=true")
    return {
        "n": integer(body, "n", 1, MOST_CHOICES) or 1,
        "temperature": _temperature(body),
        "seed": integer(body, "seed", -(2**63), 2**64 - 1),
        "stop": strings(body, "stop", MOST_STOPS),
        "stop_ids": token_ids(body, "stop_token_ids"),
        "ignore_eos": flag(body, "ignore_eos"),
        "stream": flag(body, "stream"),
        "include_usage": flag(options, "include_usage", "stream_options."),
        "tell_ids": flag(body, "return_token_ids"),
        "prompt_logprobs": prompt_logprobs,
        "shaping": _shaping(body),
        "answer": read_grammar(body),
    }


def _temperature(body: Mapping[str, Any]) -> float | None:
    """A tiny one, which some clients send for 0, is the coldest there is, as vLLM takes it."""
    said = number(body, "temperature", 0.0)
    return max(said, COLDEST) if said else said


def _shaping(body: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `Sampling` as vLLM and OpenAI spell them, those that a body has."""
    read = {
        "top_p": number(body, "top_p", 0.0),
        "min_p": number(body, "min_p", 0.0),
        "top_k": integer(body, "top_k", -1, MOST_TOKENS),
        "presence_penalty": number(body, "presence_penalty", -2.0),
        "frequency_penalty": number(body, "frequency_penalty", -2.0),
        "repetition_penalty": number(body, "repetition_penalty", 0.0),
        "min_tokens": integer(body, "min_tokens", 0, MOST_TOKENS),
        "logit_bias": _bias(mapping(body, "logit_bias")),
    }
    said = {name: value for name, value in read.items() if value is not None}
    if said.get("top_k") == -1:  # vLLM's word for all
        said["top_k"] = 0
    return said


def _bias(said: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Pairs of token and bias; JSON has ids as strings."""
    pairs = []
    for token in said:
        bias = number(said, token, -100.0)
        if not token.isdecimal() or len(token) > 10 or bias is None:
            raise wrong("logit_bias", said, "an object of numbers by token id")
        pairs.append((int(token), bias))
    return tuple(pairs)
