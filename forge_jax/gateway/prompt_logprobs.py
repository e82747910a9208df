"""What a model makes of a prompt, as vLLM and OpenAI tell it.

An engine's `PromptLogprobs` flow in with the first chunk of a call's first completion; lists of
one entry a prompt token flow out, null for the first, which has nothing before it, and for all
of an engine that tells nothing.
"""

from typing import Any

from forge_jax.gateway.call import Call
from forge_jax.gateway.openai_parts import token_bytes
from forge_jax.models.tokenizer import Tokenizer


def by_token(call: Call, tokenizer: Tokenizer, top: int | None) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: the token itself and the `top` likeliest, by their ids."""
    told, ids = call.completions[0].prompt_logprobs, call.prompt.ids.tolist()
    if told is None:
        return [None] * len(ids)

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        [text] = _texts(tokenizer, [token])
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    found: list[dict[str, Any] | None] = [None]
    rows = zip(
        ids[1:],
        told.logprobs.tolist(),
        told.ranks.tolist(),
        told.top_ids[:, :top].tolist(),
        told.top_logprobs[:, :top].tolist(),
        strict=True,
    )
    for token, logprob, rank, top_ids, top_logprobs in rows:
        likeliest = enumerate(zip(top_ids, top_logprobs, strict=True), 1)
        row = {str(token): entry(token, logprob, rank)}
        row |= {str(other): entry(other, x, place) for place, (other, x) in likeliest}
        found.append(row)
    return found


def echoed(call: Call, tokenizer: Tokenizer, top: int) -> dict[str, list[Any]]:
    """OpenAI's log-probs of a prompt that comes before its completion; offsets are the caller's."""
    told, ids = call.completions[0].prompt_logprobs, call.prompt.ids.tolist()
    first = tokenizer.piece(ids[0], True).decode("utf-8", "replace")
    nothing: list[Any] = [None] * len(ids)
    if told is not None:
        likeliest = zip(
            told.top_ids[:, :top].tolist(), told.top_logprobs[:, :top].tolist(), strict=True
        )
        tops = [dict(zip(_texts(tokenizer, row), x, strict=True)) for row, x in likeliest]
    return {
        "tokens": [first, *_texts(tokenizer, ids[1:])],
        "token_logprobs": nothing if told is None else [None, *told.logprobs.tolist()],
        "top_logprobs": nothing if told is None else [None, *tops],
    }


def _texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [raw.decode("utf-8", "replace") for raw in token_bytes(tokenizer, ids)]
