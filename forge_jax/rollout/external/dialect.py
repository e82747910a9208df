"""What an engine elsewhere must be asked, and how it answers: the part that differs by its kind.

Requests flow in and become JSON bodies; events of a stream flow in and become `Piece`s. Invariant:
every setting of a `Sampling` is said to the engine as it is meant, served here, or refused by name;
none is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forge_jax.drawing import GRAMMAR, LOST, OPEN, PLAIN, REGEX, SHAPING, Sampling, Support
from forge_jax.types import Finish, Refused


@dataclass(frozen=True, kw_only=True, eq=False)
class Ask:
    """One stretch of a completion, between two updates of the weights."""

    prompt: np.ndarray  # i32[P], with what earlier stretches sampled
    sampling: Sampling
    model: str  # the engine's name of it
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    stretch: int  # from 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What one event of a stream tells."""

    ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n], as the engine tells them
    finish: Finish | None
    cached_tokens: int  # prompt tokens that the engine read from its cache
    top_ids: np.ndarray | None  # i32[n, top_logprobs], likeliest first
    top_logprobs: np.ndarray | None  # f32[n, top_logprobs]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A POST that steers the engine."""

    path: str
    body: Mapping[str, Any]


class Dialect(Protocol):
    """One kind of engine."""

    @property
    def generate(self) -> str:
        """Path of the route that makes tokens."""
        ...

    @property
    def advice(self) -> str:
        """How such an engine is started, so that it tells what a trainer needs."""
        ...

    def body(self, ask: Ask) -> dict[str, Any]:
        """Raises Refused(400) naming the setting that the engine cannot be asked for."""
        ...

    def read(self, event: Mapping[str, Any], seen: int, top: int) -> Piece:
        """`event` of a stream that has told `seen` tokens, with `top` likeliest ones each."""
        ...

    def pause(self) -> Order:
        """Ends all running requests, and holds new ones back."""
        ...

    def load(self, path: str, version: int) -> tuple[Order, ...]:
        """Reads the weights at `path`, and forgets what was computed under others."""
        ...

    def resume(self) -> Order: ...


def words(sampling: Sampling, choice: int, stretch: int) -> int | None:
    """A seed of 63 bits and a sign, of its own for every choice and stretch; the request's own
    for the first of both. Raises Refused(400) if that has more than 64 bits."""
    seed = sampling.seed
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise Refused(400, f"seed={seed} must fit in 64 bits", param="seed")
    if choice or stretch:
        mixed = np.random.SeedSequence([seed % 2**64, choice, stretch])
        return int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1))
    return seed - 2**64 if seed >= 2**63 else seed


def check_served(sampling: Sampling, kinds: tuple[str, ...]) -> None:
    """Raises Refused(400) naming what no engine elsewhere is asked for, and grammars but those of
    `kinds`, whose meaning is the same everywhere."""
    if "" in sampling.stop:
        raise Refused(400, "stop='' must not be empty", param="stop")
    if sampling.prompt_logprobs is not None:
        asked = sampling.prompt_logprobs
        why = f"prompt_logprobs={asked}: an engine elsewhere streams no log-probs of prompts"
        raise Refused(400, why, param="prompt_logprobs")
    grammar = sampling.grammar
    if grammar is not None and grammar.kind not in kinds:
        why = {
            GRAMMAR: "rules are written in another dialect there",
            REGEX: "expressions are read in another dialect there",
        }.get(grammar.kind, "it is not known there")
        raise Refused(400, f"{grammar.source}: {why}", param=grammar.source)
    # One that may come is kept out by the grammar, which is then followed from the first token.
    if grammar is not None and grammar.thought is not None and not grammar.thought[0]:
        why = "an engine elsewhere does not wait for the end of a thought"
        raise Refused(400, f"{grammar.source}: {why}", param=grammar.source)


def shaping(sampling: Sampling) -> set[str]:
    """Settings that change what is drawn from, beside the temperature."""
    told = {name for name in SHAPING if getattr(sampling, name) != getattr(PLAIN, name)}
    return told - {"top_logprobs"}


def support_of(sampling: Sampling, size: int) -> Support | None:
    """What `size` tokens were drawn from: known where logits were biased, as the request says
    by what; lost where the engine cut or changed the distribution in ways that it does not tell."""
    changed = shaping(sampling)
    if not changed:
        return None
    if changed == {"logit_bias"}:
        ids, offsets = zip(*sampling.logit_bias, strict=True)
        return Support(
            ids=np.tile(np.array(ids, np.int32), (size, 1)),
            offsets=np.tile(np.array(offsets, np.float32), (size, 1)),
            kind=np.full(size, OPEN, np.int8),
        )
    return Support(
        ids=np.full((size, 1), -1, np.int32),
        offsets=np.zeros((size, 1), np.float32),
        kind=np.full(size, LOST, np.int8),
    )


def bounded(sampling: Sampling) -> str | None:
    """The setting, if any, that makes a completion one whole: its rest cannot be asked for anew."""
    for name in ("grammar", "presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != getattr(PLAIN, name):
            return name
    return None


def finish_of(reason: str | None) -> Finish | None:
    """Raises Refused(502) on a reason that is none of ours."""
    if reason is None:
        return None
    try:
        return Finish(reason)
    except ValueError:
        raise Refused(502, f"the engine ended a completion with {reason!r}") from None
