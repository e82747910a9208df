"""Requests as the scheduler holds them.

A `Request` comes in from a caller, a validated `Job` goes out; a job is owned by the
scheduler alone and ends exactly once.
"""

from dataclasses import dataclass

import numpy as np

from forge_jax.rollout.packets import STOP_IDS, Row
from forge_jax.rollout.stop import StopStrings
from forge_jax.types import Refused, Request, Sampling


@dataclass(eq=False, slots=True)
class Job:
    """One live request."""

    number: int  # of the submission, unique in the engine
    row: Row
    stop: StopStrings | None
    submitted: float  # when, in seconds
    asked: int = 0  # tokens whose sampling has been dispatched
    fresh: bool = True  # no chunk has left yet


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an engine can serve."""

    context: int  # tokens a sequence may have, prompt included
    vocab: int
    stop_ids: tuple[int, ...]  # of the model


def seed_words(seed: int) -> tuple[int, int]:
    """High and low 32 bits of a seed: the data of ``jax.random.key(seed)``."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def seed_of(sampling: Sampling, root: int, count: int) -> tuple[int, int]:
    """The words of a request's seed; of one drawn from (root, count) if it brings none.

    Raises Refused(400) if the seed has more than 64 bits.
    """
    if sampling.seed is None:
        sequence = np.random.SeedSequence(root, spawn_key=(count,))
        high, low = sequence.generate_state(2, np.uint32)
        return int(high), int(low)
    if not -(2**63) <= sampling.seed < 2**64:
        raise Refused(400, f"seed={sampling.seed} must fit in 64 bits")
    return seed_words(sampling.seed)


def row_of(request: Request, limits: Limits, seed: tuple[int, int]) -> Row:
    """What the device needs of `request`.

    Raises Refused(400) if the prompt is empty, outside the vocabulary or leaves no room
    for a token (code "context_length_exceeded"), or the stops cannot be watched for.
    """
    prompt, sampling = np.asarray(request.prompt, np.int32), request.sampling
    _check_prompt(prompt, limits)
    if "" in sampling.stop:
        raise Refused(400, "stop='' must not be empty")
    room = limits.context - len(prompt)
    return Row(
        prompt=prompt,
        limit=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
        seed=seed,
        choice=sampling.choice,
        temperature=sampling.temperature,
        stop_ids=_stop_ids(sampling, limits),
    )


def _check_prompt(prompt: np.ndarray, limits: Limits) -> None:
    if prompt.ndim != 1 or not len(prompt):
        raise Refused(400, f"the prompt must be a non-empty list of ids, its shape={prompt.shape}")
    if len(prompt) >= limits.context:
        message = (
            f"the prompt has {len(prompt)} tokens; a sequence may have "
            f"{limits.context}, with at least one of them sampled"
        )
        raise Refused(400, message, code="context_length_exceeded")
    outside = prompt[(prompt < 0) | (prompt >= limits.vocab)]
    if len(outside):
        raise Refused(400, f"prompt id {outside[0]} is outside the vocabulary of {limits.vocab}")


def _stop_ids(sampling: Sampling, limits: Limits) -> tuple[int, ...]:
    if sampling.ignore_eos:
        return ()
    ids = tuple(sorted({*limits.stop_ids, *sampling.stop_ids}))
    if len(ids) > STOP_IDS:
        raise Refused(400, f"{len(ids)} stop ids, at most {STOP_IDS} can be watched")
    return ids
