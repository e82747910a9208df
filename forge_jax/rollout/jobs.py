"""Requests as the scheduler holds them.

A `Request` comes in from a caller, a validated `Job` goes out; a job is owned by the
scheduler alone and ends exactly once. While it has a slot it also has a `Stay` there.
"""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.drawing import PLAIN, SHAPING
from forge_jax.rollout.grammar import Matcher
from forge_jax.rollout.packets import BIASES, STOP_IDS, Fresh, Scores
from forge_jax.rollout.prefix import Node
from forge_jax.rollout.stop import CertainRun, StopStrings
from forge_jax.types import NO_ROUTE, PromptLogprobs, Refused, Request, Sampling


@dataclass(eq=False, slots=True)
class Job:
    """One live request; what it was given so far can be computed again at any time."""

    number: int  # of the submission, unique in the engine
    tokens: np.ndarray  # i32[total]: the prompt, then what was sampled, then room for more
    prompt: int  # tokens of it
    length: int  # known tokens
    fresh: Fresh  # how it began
    sampling: Sampling
    stop: StopStrings | None
    submitted: float  # when, in seconds
    began: float | None = None  # when the device first worked on it
    cached: int = 0  # tokens of the prompt that were read from the prefix tree
    silent: bool = True  # no chunk has left yet
    routes: np.ndarray | None = None  # int[total, layers, k], as far as they are read
    routed: int = 0  # tokens whose routes have left
    root: bytes = b""  # that `keys` begin with
    keys: list[bytes] = field(default_factory=list)  # of full pages that another may have computed
    scores: PromptLogprobs | None = None  # of the prompt, as far as they are read
    held: bool = False  # pages of it are being fetched
    awaited: bytes = b""  # a running request is computing this page of it
    waits_at: int = 0  # the place of that one
    matcher: Matcher | None = None  # of its grammar, where it has one
    certain: CertainRun | None = None  # that it is cut off at

    @property
    def total(self) -> int:
        """Tokens it may come to."""
        return len(self.tokens)

    @property
    def scoring(self) -> bool:
        """Its prompt is to be read by calls that tell log-probs."""
        return self.scores is not None and self.silent

    def row(self) -> Fresh:
        """What the device must know to go on from here."""
        token, left = int(self.tokens[self.length - 1]), self.total - self.length
        return dataclasses.replace(self.fresh, token=token, limit=left)

    def record(self, start: int, routes: np.ndarray) -> None:
        """Takes in the experts of tokens from `start` on."""
        if self.routes is None:
            self.routes = np.full((self.total, *routes.shape[1:]), NO_ROUTE, routes.dtype)
        self.routes[start : start + len(routes)] = routes

    def score(self, start: int, told: Scores) -> None:
        """Takes in what is told of the tokens behind those from `start` on."""
        assert self.scores is not None, "nobody asked for it"
        for name, new in told._asdict().items():
            kept = vars(self.scores)[name][start : start + len(new)]
            kept[:] = new[:, : kept.shape[1]] if kept.ndim > 1 else new


@dataclass(eq=False, slots=True)
class Stay:
    """A job's time in a slot, and the pages it has there."""

    job: Job
    place: int  # of the mesh
    nodes: list[Node]  # its first pages, which are in the prefix tree
    found: int  # of them that others had computed
    target: int  # tokens to compute before the first is sampled
    filled: int  # of them that are computed by the calls planned so far
    publishes: bool  # all its keys and values are of the present weights
    pages: list[int]  # its pages behind those of `nodes`, its own alone
    slot: int = -1
    on_device: bool = False  # the slot's state is there
    least: int = 0  # tokens that unread calls sample if it does not end
    most: int = 0  # ... and at most
    followed: bool = True  # whatever drafts for it knows all of its tokens
    over: bool = False  # the slot and the pages are someone else's now

    @property
    def table(self) -> list[int]:
        """All its pages in order."""
        return [*(node.page for node in self.nodes), *self.pages]

    @property
    def ready(self) -> bool:
        """Its next token can be sampled."""
        return self.filled >= self.target and not self.asked

    @property
    def asked(self) -> bool:
        """All that it may sample has been asked for."""
        return self.job.length + self.least >= self.job.total


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


def job_of(
    request: Request,
    limits: Limits,
    number: int,
    seed: tuple[int, int],
    stop: StopStrings | None,
    now: float,
    matcher: Matcher | None = None,
) -> Job:
    """`request` as a job.

    Raises Refused(400) if the prompt is empty, outside the vocabulary or leaves no room
    for a token (code "context_length_exceeded"), or the stops cannot be watched for.
    """
    prompt, sampling = np.asarray(request.prompt, np.int32), request.sampling
    _check_prompt(prompt, limits)
    room = limits.context - len(prompt)
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    fresh = Fresh(
        token=int(prompt[-1]),
        limit=limit,
        seed=seed,
        choice=sampling.choice,
        temperature=sampling.temperature,
        stop_ids=_stop_ids(sampling, limits),
    )
    tokens = np.concatenate([prompt, np.zeros(limit, np.int32)])
    length = len(prompt)
    job = Job(number, tokens, length, length, fresh, sampling, stop, now, matcher=matcher)
    if sampling.prompt_logprobs is not None:
        job.scores = _unscored(len(prompt) - 1, min(sampling.prompt_logprobs, limits.vocab))
    return job


def _unscored(size: int, top: int) -> PromptLogprobs:
    """Room for what is told of `size` tokens."""
    return PromptLogprobs(
        logprobs=np.zeros(size, np.float32),
        ranks=np.zeros(size, np.int32),
        top_ids=np.zeros((size, top), np.int32),
        top_logprobs=np.zeros((size, top), np.float32),
    )


def check_asked(sampling: Sampling, rollout: RolloutConfig, limits: Limits) -> None:
    """Raises Refused(400) where the engine was not made for what is asked."""
    if "" in sampling.stop:
        raise Refused(400, "stop='' must not be empty")
    if sampling.shaped and not rollout.shaping:
        asked = [name for name in SHAPING if getattr(sampling, name) != getattr(PLAIN, name)]
        name = asked[0] if sampling.grammar is None else sampling.grammar.source
        raise Refused(400, f"{name} needs an engine with rollout.shaping=True", param=name)
    if sampling.top_logprobs > rollout.top_logprobs:
        raise Refused(
            400,
            f"top_logprobs={sampling.top_logprobs} is more than "
            f"rollout.top_logprobs={rollout.top_logprobs}",
            param="top_logprobs",
        )
    asked_prompt, most = sampling.prompt_logprobs, rollout.prompt_logprobs
    if asked_prompt is not None and (most is None or asked_prompt > most):
        raise Refused(
            400,
            f"prompt_logprobs={asked_prompt} needs an engine with "
            f"rollout.prompt_logprobs={asked_prompt} or more, which is {most}",
            param="prompt_logprobs",
        )
    if len(sampling.logit_bias) > BIASES:
        count = len(sampling.logit_bias)
        raise Refused(400, f"logit_bias has {count} tokens, at most {BIASES}", param="logit_bias")
    for token, _ in sampling.logit_bias:
        if not 0 <= token < limits.vocab:
            raise Refused(
                400,
                f"logit_bias: token {token} is outside the vocabulary of {limits.vocab}",
                param="logit_bias",
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
