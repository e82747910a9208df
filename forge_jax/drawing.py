"""How tokens are drawn from logits: what is asked for, and what there was to choose from.

Frozen records of plain numbers and numpy; `forge_jax.types` has them too. Invariant: settings
that a record has are within their ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Kinds of a `Grammar`: what its text is.
JSON_SCHEMA, REGEX, CHOICE, GRAMMAR = "json", "regex", "choice", "grammar"
KINDS = (JSON_SCHEMA, REGEX, CHOICE, GRAMMAR)
# Kinds of a `Support`.
OPEN, CLOSED, LOST = range(3)

# Temperatures but 0. Below, differences of float32 logits divided by it are noise, and above,
# logits are no longer apart.
COLDEST, HOTTEST = 0.01, 1e4
REPETITION = (0.01, 100.0)  # from, to: what float32 logits bear


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The language that a whole completion belongs to, up to the stop id that ends it."""

    kind: str  # one of KINDS
    # A JSON schema; a regular expression, matched whole, where \d is 0 to 9; a JSON list of texts;
    # or rules, in llguidance's dialect of Lark or, where they have "::=", in GBNF.
    text: str
    source: str = field(default="grammar", compare=False)  # the field that asked, for errors
    # Tags of a thought that may come first, any text between; an opening tag of "" is there, as if
    # the prompt had it, and the thought has to end. None: no thought.
    thought: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one completion is drawn.

    Token at position p of the sequence is drawn with the randomness of
    (seed, choice, p) alone, so it does not depend on what runs beside it.

    Logits first lose what the grammar does not allow, get the bias and the penalties, lose what may
    not come yet, and are divided by the temperature; of what is left `min_p`, then `top_k`, then
    `top_p` keep the likeliest, which are drawn from in proportion. Ranges and meanings are vLLM's,
    which are OpenAI's where that has them.
    """

    temperature: float = 1.0  # 0 is greedy, else from COLDEST to HOTTEST
    max_tokens: int | None = None  # None: up to the engine's context
    seed: int | None = None  # None: the engine draws one
    choice: int = 0  # number of this completion among the n of one request
    stop: tuple[str, ...] = ()  # stop strings; the text is cut before the first
    stop_ids: tuple[int, ...] = ()  # token ids that end the completion, kept as its last token
    ignore_eos: bool = False  # True: stop_ids do not end the completion
    top_p: float = 1.0  # the fewest of the likeliest tokens whose share is at least this
    top_k: int = 0  # at most so many tokens; 0: all
    min_p: float = 0.0  # tokens at least this times as likely as the likeliest
    presence_penalty: float = 0.0  # taken off the logits of what the completion has already
    frequency_penalty: float = 0.0  # ... for each time
    repetition_penalty: float = 1.0  # divides the positive logits, and multiplies the negative
    # ones, of tokens that prompt or completion have already
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of tokens
    min_tokens: int = 0  # sampled before a stop id can be
    top_logprobs: int = 0  # likeliest tokens told beside each sampled one
    prompt_logprobs: int | None = None  # ... beside each token of the prompt; None: nothing is
    grammar: Grammar | None = None  # that the completion belongs to

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        for name, low, high in (("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)):
            self._check(name, low <= getattr(self, name) <= high, f"from {low} to {high}")
        drawn = self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST
        self._check("temperature", drawn, f"0, or from {COLDEST:g} to {HOTTEST:g}")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= 0, "0, for all, or more")
        self._check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        least, most = REPETITION
        within = least <= self.repetition_penalty <= most
        self._check("repetition_penalty", within, f"from {least:g} to {most:g}")
        self._check("min_tokens", self.min_tokens >= 0, "0 or more")
        self._check("top_logprobs", self.top_logprobs >= 0, "0 or more")
        told = self.prompt_logprobs
        self._check("prompt_logprobs", told is None or told >= 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = self.max_tokens
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={most}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos=True does not go with a grammar, which a stop id ends")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias[{token}]={bias} must be from -100 to 100")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)} must be {rule}")

    @property
    def shaped(self) -> bool:
        """Whether more is done to the logits, or told of them, than the temperature."""
        return any(getattr(self, name) != getattr(PLAIN, name) for name in SHAPING)


SHAPING = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "top_logprobs", "grammar",
)  # fmt: skip
PLAIN = Sampling()


@dataclass(frozen=True, kw_only=True, eq=False)
class Support:
    """What each of some tokens was drawn from, so that a trainer can do the same.

    ``softmax((logits + offset) / temperature)``, where the offset of a listed token is in
    `offsets`, and that of one that is not is 0 if OPEN, -inf if CLOSED. -inf: cannot come.
    """

    ids: np.ndarray  # i32[n, S], -1 where unused
    offsets: np.ndarray  # f32[n, S], 0 where unused
    kind: np.ndarray  # i8[n]: OPEN, CLOSED, or LOST, where it was too much to be listed

    def at(self, places: np.ndarray | slice) -> "Support":
        """Of some of the tokens."""
        return Support(ids=self.ids[places], offsets=self.offsets[places], kind=self.kind[places])

    def filled(self, size: int) -> "Support":
        """Padded to `size` tokens, with such that nothing was done to."""
        return joined([self, nothing_of(size - len(self.kind), self.ids.shape[1])])


def nothing_of(size: int, width: int) -> Support:
    """Of `size` tokens that nothing was done to."""
    return Support(
        ids=np.full((size, width), -1, np.int32),
        offsets=np.zeros((size, width), np.float32),
        kind=np.full(size, OPEN, np.int8),
    )


def widened(support: Support, width: int) -> Support:
    """With room for `width` tokens each."""
    missing = width - support.ids.shape[1]
    pad = ((0, 0), (0, missing))
    return Support(
        ids=np.pad(support.ids, pad, constant_values=-1),
        offsets=np.pad(support.offsets, pad),
        kind=support.kind,
    )


def joined(parts: Sequence[Support]) -> Support:
    """One after another, as wide as the widest."""
    width = max(part.ids.shape[1] for part in parts)
    wide = [widened(part, width) for part in parts]
    return Support(
        ids=np.concatenate([part.ids for part in wide]),
        offsets=np.concatenate([part.offsets for part in wide]),
        kind=np.concatenate([part.kind for part in wide]),
    )
