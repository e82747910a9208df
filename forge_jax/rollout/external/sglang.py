"""SGLang's `/generate` with token ids, and its routes for reinforcement learning.

Requests and events flow through as `dialect` says. As of SGLang 0.5, started with
``--enable-deterministic-inference`` where seeds are to count. Its log-probs are under the
temperature and before truncation, so truncated draws are told as lost.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_jax.drawing import JSON_SCHEMA
from forge_jax.rollout.external.dialect import Ask, Order, Piece, check_served, finish_of, words
from forge_jax.types import Refused


class Sglang:
    """Implements `Dialect`."""

    generate = "/generate"
    advice = (
        "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, and with "
        "--enable-deterministic-inference so that seeds count"
    )

    def body(self, ask: Ask) -> dict[str, Any]:
        """Randomness is of (seed, position), so that a stretch goes on with the same seed."""
        sampling = ask.sampling
        check_served(sampling, (JSON_SCHEMA,))
        seed, grammar = words(sampling, sampling.choice, 0), sampling.grammar
        settings: dict[str, Any] = {
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": ask.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(ask.stop_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.logit_bias:
            settings["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if seed is not None:
            settings["sampling_seed"] = seed
        if grammar is not None:
            settings["json_schema"] = json.dumps(json.loads(grammar.text))
        return {
            "input_ids": ask.prompt.tolist(),
            "sampling_params": settings,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.top_logprobs,
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], seen: int, top: int) -> Piece:
        """Events tell all tokens so far, or the new ones with --incremental-streaming-output."""
        meta = event["meta_info"]
        told = meta.get("output_token_logprobs") or []
        skip = seen - (meta["completion_tokens"] - len(told))
        if not 0 <= skip <= len(told):
            raise Refused(502, f"the engine left out tokens behind the first {seen}")
        new = told[skip:]
        likeliest = (meta.get("output_top_logprobs") or [])[skip:] if top else None
        ends = meta["finish_reason"]
        return Piece(
            ids=np.array([entry[1] for entry in new], np.int32),
            logprobs=np.array([entry[0] for entry in new], np.float32),
            finish=finish_of(ends and ends["type"]),
            cached_tokens=meta.get("cached_tokens") or 0,
            top_ids=_column(likeliest, 1, top, np.int32),
            top_logprobs=_column(likeliest, 0, top, np.float32),
        )

    def pause(self) -> Order:
        return Order(path="/pause_generation", body={"mode": "abort"})

    def load(self, path: str, version: int) -> tuple[Order, ...]:
        told = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        return (Order(path="/update_weights_from_disk", body=told),)

    def resume(self) -> Order:
        return Order(path="/continue_generation", body={})


def _column(rows: Any, column: int, top: int, dtype: Any) -> np.ndarray | None:
    if rows is None:
        return None
    return np.array([[entry[column] for entry in row] for row in rows], dtype).reshape(-1, top)
