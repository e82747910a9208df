"""What must be known of an engine elsewhere before it is relied on, found by asking it.

A connection flows in; the engine's model and its limit flow out. Invariant: an engine that tells
log-probs of something else than what it draws from, or ignores seeds, is refused before the first
request.
"""

import os
from contextlib import aclosing

import httpx
import numpy as np

from forge_jax.config import ExternalConfig, UserError
from forge_jax.drawing import Sampling
from forge_jax.rollout.external import wire
from forge_jax.rollout.external.dialect import Ask, Dialect, Piece
from forge_jax.types import Refused

PROMPT = np.array([1, 2, 3], np.int32)  # any ids that every vocabulary has
COLD = 0.01  # a temperature that makes the likeliest token all but certain
SHARP = -1e-2  # log-prob of a token that is as good as certain without it
SAMPLED = 16  # tokens that two seeds must agree in


def key_of(cfg: ExternalConfig) -> str | None:
    """The engine's API key, from the environment. Raises UserError where it is not there."""
    if cfg.key_variable is None:
        return None
    key = os.environ.get(cfg.key_variable)
    if not key:
        raise UserError(f"external.key_variable={cfg.key_variable}: no such environment variable")
    return key


async def served_model(http: httpx.AsyncClient, url: str) -> tuple[str, int]:
    """The engine's name of its model, and the tokens that a sequence may have there.

    Raises UserError where there is no such engine.
    """
    try:
        card = (await wire.get(http, "/v1/models"))["data"][0]
        return str(card["id"]), int(card["max_model_len"])
    except Refused as refused:
        raise UserError(f"engine_url={url}: {refused}") from refused
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"engine_url={url}: /v1/models tells no model with max_model_len"
        ) from error


async def check_told(
    http: httpx.AsyncClient, dialect: Dialect, model: str, seeds: bool, url: str
) -> None:
    """Raises UserError where log-probs are not under the temperature or, with `seeds`, two
    completions of one seed differ."""

    async def told(temperature: float, seed: int, size: int = 1) -> Piece:
        sampling = Sampling(temperature=temperature, seed=seed, ignore_eos=True)
        ask = Ask(
            prompt=PROMPT, sampling=sampling, model=model, max_tokens=size, min_tokens=0,
            stop_ids=(), stretch=0,
        )  # fmt: skip
        return await _completion(http, dialect, ask)

    try:
        greedy, cold = await told(0.0, 1), await told(COLD, 1)
        one, other = await told(1.0, 2, SAMPLED), await told(1.0, 2, SAMPLED)
    except Refused as refused:
        raise UserError(f"engine_url={url}: {refused}; {dialect.advice}") from refused
    # No token is likelier than the likeliest, but under a temperature that sharpens.
    if greedy.logprobs[0] < SHARP and cold.logprobs[0] <= greedy.logprobs[0] + 1e-4:
        raise UserError(
            f"engine_url={url}: its log-probs are not under the temperature; {dialect.advice}"
        )
    if seeds and one.ids.tolist() != other.ids.tolist():
        raise UserError(
            f"engine_url={url}: external.seeds=true, but one seed gave two completions; "
            f"{dialect.advice}, or set external.seeds=false"
        )


async def _completion(http: httpx.AsyncClient, dialect: Dialect, ask: Ask) -> Piece:
    """All of it at once. Raises Refused."""
    ids, logprobs, seen, finish = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], 0, None
    async with aclosing(wire.events(http, dialect.generate, dialect.body(ask))) as events:
        async for event in events:
            piece = dialect.read(event, seen, 0)
            ids.append(piece.ids)
            logprobs.append(piece.logprobs)
            seen, finish = seen + len(piece.ids), piece.finish or finish
    if not seen:
        raise Refused(502, "a completion without a token")
    return Piece(
        ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), finish=finish,
        cached_tokens=0, top_ids=None, top_logprobs=None,
    )  # fmt: skip
