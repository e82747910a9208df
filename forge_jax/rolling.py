"""Configuration of the rollout engine, and of one elsewhere."""

import math
from dataclasses import dataclass, field

from forge_jax.loading import check

DTYPES = ("float32", "bfloat16")  # that layers are computed in
UPDATES = ("keep", "recompute", "wait", "abort")  # see `forge_jax.rollout.engine`
PAGED = ("auto", "xla", "pallas")  # see `forge_jax.attention.paged`
ENGINES = ("real", "vllm", "sglang")  # our own, or one elsewhere, see `forge_jax.rollout.external`
EXTERNAL_UPDATES = ("recompute", "wait", "abort")  # see `forge_jax.rollout.external.engine`
SPECULATE = ("off", "mtp", "ngram")  # what drafts: nothing, the model's modules, earlier text


@dataclass(frozen=True, kw_only=True)
class CertainConfig:
    """The run of near-certain tokens at which a completion is cut off, as one that loops."""

    tokens: int = 0  # in a row; 0: none is cut off
    p: float = 0.99  # probability under softmax(logits) above which a token is near-certain

    def __post_init__(self) -> None:
        check(self.tokens >= 0, f"tokens={self.tokens} must be >= 0")
        check(0 < self.p < 1, f"p={self.p} must be between 0 and 1")
        check(self.tokens > 0 or self.p == 0.99, f"p={self.p} without tokens cuts nothing off")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sizes of the rollout engine; every compiled shape follows from them."""

    slots: int = 64  # sequences decoded at once
    context: int = 64  # tokens a sequence may have, prompt included
    page: int = 16  # tokens of a page of keys and values
    pages: int | None = None  # of all sequences and of what is cached; null: see `place_pages`
    places: int | None = None  # that slots and pages are dealt to; null: those of the mesh
    chunk: int = 256  # tokens of a prefill call at every place
    decode_steps: int = 4  # tokens decoded per device call
    dtype: str | None = None  # of the engine's copy of the weights; null: as they are given
    routes: bool = False  # record which experts every token uses, for training to replay
    prefix_cache: bool = True  # read what other requests have computed of a prompt
    deterministic: bool = False  # one shape a program: the same bits whatever is cached
    update: str = "keep"  # what new weights do to running requests: keep | recompute | wait | abort
    attention: str = "auto"  # over pages: auto (by the device) | xla | pallas
    host_pages: int = 0  # pages kept in host memory when they leave the device; 0: none
    store: str | None = None  # where pages are kept that engines share: see docs/rollout.md
    shaping: bool = False  # serve truncation, penalties, bias, min_tokens and top log-probs
    top_logprobs: int = 0  # likeliest tokens told beside a sampled one, at most; needs shaping
    prompt_logprobs: int | None = None  # likeliest tokens told beside those of a prompt, at most;
    # null: nothing is told of prompts
    support: int = 64  # tokens that the support of a shaped draw may list, to be trained on
    speculate: str = "off"  # what drafts tokens for the model to verify: off | mtp | ngram
    drafts: int = 2  # tokens drafted at most for a verify; fewer, or none, where that is faster
    certain: CertainConfig = field(default_factory=CertainConfig)

    def __post_init__(self) -> None:
        for name in ("slots", "context", "page", "chunk", "decode_steps"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        check(self.chunk % self.page == 0, f"chunk={self.chunk} must be whole pages of {self.page}")
        check(self.dealt >= 1, f"places={self.places} must be at least 1")
        check(
            self.slots % self.dealt == 0,
            f"slots={self.slots} must be a multiple of places={self.places}",
        )
        least, each = self.sequence_pages + 1, "" if self.dealt == 1 else " at every place"
        check(
            self.place_pages > least,
            f"pages={self.pages} must be above {least * self.dealt}, for one sequence and for "
            f"padding{each}",
        )
        check(self.host_pages >= 0, f"host_pages={self.host_pages} must be >= 0")
        check(
            self.prefix_cache or not (self.host_pages or self.store),
            "prefix_cache=False: host_pages and store keep pages of the prefix cache",
        )
        check(self.support >= 1, f"support={self.support} must be at least 1")
        check(self.top_logprobs >= 0, f"top_logprobs={self.top_logprobs} must be >= 0")
        check(
            self.shaping or not self.top_logprobs,
            f"top_logprobs={self.top_logprobs} needs shaping=True",
        )
        told = self.prompt_logprobs
        check(told is None or told >= 0, f"prompt_logprobs={told} must be null or >= 0")
        check(self.drafts >= 1, f"drafts={self.drafts} must be at least 1")
        choices = (("update", UPDATES), ("attention", PAGED), ("speculate", SPECULATE))
        for name, known in choices:
            said = getattr(self, name)
            check(said in known, f"{name}={said!r} must be one of {', '.join(known)}")
        check(
            self.dtype in (None, *DTYPES), f"dtype={self.dtype!r} must be null or one of {DTYPES}"
        )

    @property
    def tiered(self) -> bool:
        """Pages are kept below the device."""
        return self.host_pages > 0 or self.store is not None

    @property
    def sequence_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context // self.page)

    @property
    def dealt(self) -> int:
        """Places that slots and pages are dealt to; one until the mesh is known."""
        return 1 if self.places is None else self.places

    @property
    def place_slots(self) -> int:
        """Slots of a place."""
        return self.slots // self.dealt

    @property
    def place_pages(self) -> int:
        """Pages of a place; where `pages` is null as many as its slots can fill, half as many
        again for what is cached, and one that padding is written to."""
        if self.pages is not None:
            return -(-self.pages // self.dealt)
        return (3 * self.place_slots * self.sequence_pages + 1) // 2 + 2

    @property
    def pool_pages(self) -> int:
        """Pages there are at all places."""
        return self.dealt * self.place_pages

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of drafts that are compiled: none, powers of two, and the most; where results
        are to repeat to the bit, the most alone."""
        if self.speculate == "off":
            return (0,)
        if self.deterministic:
            return (self.drafts,)
        powers = (1 << i for i in range(self.drafts.bit_length()))
        return (0, *sorted({*powers, self.drafts}))

    @property
    def modules(self) -> int:
        """Prediction modules of the model that the engine drafts with."""
        return self.drafts if self.speculate == "mtp" else 0

    @property
    def bundle(self) -> int:
        """Slots that may read a common prefix together: a power of two that divides those of a
        place."""
        return math.gcd(self.place_slots, 8)


@dataclass(frozen=True, kw_only=True)
class ExternalConfig:
    """How an engine elsewhere is treated."""

    update: str = "recompute"  # what new weights do to running requests: recompute | wait | abort
    seeds: bool = True  # seeds must count; False: requests do not repeat
    key_variable: str | None = None  # environment variable with the engine's API key
    folder: str | None = None  # that weights are published in, on both machines; null: the run's
    patience_seconds: float = 60.0  # without an answer of the engine, until a run ends

    def __post_init__(self) -> None:
        known = ", ".join(EXTERNAL_UPDATES)
        check(self.update in EXTERNAL_UPDATES, f"update={self.update!r} must be one of {known}")
        check(self.patience_seconds > 0, f"patience_seconds={self.patience_seconds} must be > 0")


def check_engine(engine: str, url: str | None, external: ExternalConfig) -> None:
    """Raises ValueError unless `url` and `external` go with the kind of `engine`."""
    elsewhere = engine in ("vllm", "sglang")
    check(not elsewhere or url is not None, f"engine_url=null: engine={engine} needs one")
    check(
        elsewhere or url is None,
        f"engine_url={url!r} goes with engine=vllm or sglang, and with no other",
    )
    check(
        url is None or url.startswith(("http://", "https://")),
        f"engine_url={url!r} must begin with http:// or https://",
    )
    check(
        elsewhere or external == ExternalConfig(),
        f"external goes with engine=vllm or sglang, not with engine={engine}",
    )
