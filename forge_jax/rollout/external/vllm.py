"""vLLM's `/v1/completions` with token ids, and its routes for reinforcement learning.

Requests and events flow through as `dialect` says. As of vLLM 0.32, started with
``VLLM_SERVER_DEV_MODE=1`` and ``--logprobs-mode processed_logprobs``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.drawing import CHOICE, JSON_SCHEMA, Sampling
from forge_jax.rollout.external.dialect import Ask, Order, Piece, check_served, finish_of, words

TOKEN = "token_id:"  # begins a token that vLLM names by its id


class Vllm:
    """Implements `Dialect`."""

    generate = "/v1/completions"
    advice = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs, "
        "the log-probs of what is drawn from"
    )

    def body(self, ask: Ask) -> dict[str, Any]:
        """Settings are all said, because a model's generation_config.json fills in others."""
        sampling = ask.sampling
        check_served(sampling, (JSON_SCHEMA, CHOICE))
        return {
            "model": ask.model,
            "prompt": ask.prompt.tolist(),
            "max_tokens": ask.max_tokens,
            "min_tokens": ask.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
            "seed": words(sampling, sampling.choice, ask.stretch),
            "stop_token_ids": list(ask.stop_ids),
            "ignore_eos": sampling.ignore_eos,
            "structured_outputs": _structure(sampling),
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def read(self, event: Mapping[str, Any], seen: int, top: int) -> Piece:
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        if not event["choices"]:  # the usage of the whole comes behind the last token
            return _piece([], [], None, cached, [] if top else None, top)
        [choice] = event["choices"]
        ids, told = choice["token_ids"] or [], choice["logprobs"] or {"token_logprobs": []}
        likeliest = told["top_logprobs"] if top and ids else ([] if top else None)
        finish = finish_of(choice["finish_reason"])
        return _piece(ids, told["token_logprobs"], finish, cached, likeliest, top)

    def pause(self) -> Order:
        return Order(path="/pause?mode=abort", body={})

    def load(self, path: str, version: int) -> tuple[Order, ...]:
        told = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        return (
            Order(path="/collective_rpc", body=told),
            Order(path="/reset_prefix_cache", body={}),
        )

    def resume(self) -> Order:
        return Order(path="/resume", body={})


def _structure(sampling: Sampling) -> dict[str, Any] | None:
    grammar = sampling.grammar
    if grammar is None:
        return None
    return {"json" if grammar.kind == JSON_SCHEMA else "choice": json.loads(grammar.text)}


def _piece(
    ids: Sequence[int],
    logprobs: Sequence[float],
    finish: Any,
    cached: int,
    likeliest: Sequence[Mapping[str, float]] | None,
    top: int,
) -> Piece:
    rows = None if likeliest is None else [_ranked(row, top) for row in likeliest]
    return Piece(
        ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish=finish,
        cached_tokens=cached,
        top_ids=None if rows is None else np.array([[t for _, t in r] for r in rows], np.int32),
        top_logprobs=None
        if rows is None
        else -np.array([[lp for lp, _ in r] for r in rows], np.float32),
    )


def _ranked(row: Mapping[str, float], top: int) -> list[tuple[float, int]]:
    """(-log-prob, token) of the likeliest: vLLM tells the sampled token among them too."""
    return sorted((-logp, int(name.removeprefix(TOKEN))) for name, logp in row.items())[:top]
