"""Integer layouts of what crosses between host and device: one array per device call.

Page tables, tokens and the settings of requests flow in; every decode step returns
``i32[..., 4]``, a token, its two log-probs and its status. Floats travel as their bits, so that
nothing is rounded on the way. Invariant: every shape that the host can ask for is among
`prefill_shapes` and `decode_shapes` of its configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.drawing import Sampling
from forge_jax.rollout.rows import row_buckets, row_of, rows_of_spans

SCRATCH = 0  # the page that padding points to

# Columns of a prefill row's header.
SLOT, START, LENGTH = range(3)
PREFILL_HEADER = 3

# Columns of a decode row's header; STOP is the first of STOP_IDS columns, -1 where unused.
STATE, TOKEN, POSITION, LIMIT, SEED_HIGH, SEED_LOW, CHOICE, TEMPERATURE, STOP = range(9)
STOP_IDS = 16
HEADER = STOP + STOP_IDS
# Columns of the settings of a shaped row; see `drawing.Sampling`. Ids and values of the bias
# follow, then the tokens that are forced in the steps of the call, -1 where none is, a bit for each
# token that may come behind them, and all tokens of the sequence, -1 beyond its end.
TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, STOP_FROM, PROMPT, STEPS = range(9)
SETTINGS = 9
BIASES = 64  # tokens of a row that may have a bias
# States of a row: nobody's; its state is on the device; its state is in the header.
EMPTY, KEPT, FRESH = range(3)

# Columns of a result.
SAMPLED, LOGP, RAW, STATUS = range(4)
# Statuses: no token was sampled; the request goes on; it met a stop id; its limit is used up.
IDLE, GOES_ON, STOPPED, EXHAUSTED = range(4)


class Sampled(NamedTuple):
    """What a decode call gives for K steps of B rows, each of a window of γ + 1 tokens."""

    packet: Any  # i32[K, γ + 1, B, 4]
    # int[K, γ + 1, B, layers, k], the experts of the tokens that were fed. None: not recorded.
    routes: Any
    draws: Any = None  # `shaped.Draws` [K, 1, B, ...] of a shaped call


class Scores(NamedTuple):
    """What a scored prefill call gives for R spans of T tokens, of each token behind one; see
    `types.PromptLogprobs`."""

    logprobs: Any  # f32[R, T]
    ranks: Any  # i32[R, T]
    top_ids: Any  # i32[R, T, top]
    top_logprobs: Any  # f32[R, T, top]


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """What a prefill call is compiled for; it has ``rollout.chunk // tokens`` rows at every place,
    one place's behind the other's."""

    tokens: int  # of a row
    pages: int  # of a row's table
    scored: bool = False  # the log-prob of each next token is told
    places: int = 1  # that rows and pages are dealt to


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """What a decode call is compiled for."""

    rows: int  # B: of every place the first slots, as many of each; for one place 0 .. B - 1
    shared: int  # pages of a bundle's table; 0: no bundle shares any
    own: int  # pages of a row's table
    steps: int  # K
    drafts: int  # γ: tokens guessed before each step
    places: int = 1  # that rows and pages are dealt to
    words: int = 0  # of the bits of a row's tokens, where rows have settings

    @property
    def shaped(self) -> bool:
        """Rows have settings."""
        return self.words > 0

    def settings(self, page: int) -> int:
        """Columns of the settings of a row."""
        return SETTINGS + 2 * BIASES + self.steps + self.words + self.own * page


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """Tokens of a sequence whose keys and values are to be computed."""

    slot: int
    start: int  # position of the first
    tokens: np.ndarray  # i32[n]
    table: Sequence[int]  # pages of the sequence, at least up to the last token
    following: int = 0  # the token behind them, where they are scored


@dataclass(frozen=True, kw_only=True, eq=False)
class Fresh:
    """What the device must know of a request to sample it."""

    token: int  # the last known one, which is fed first
    limit: int  # tokens it may sample
    seed: tuple[int, int]  # high and low 32 bits
    choice: int
    temperature: float
    stop_ids: tuple[int, ...]  # at most STOP_IDS
    # i32[2 context], what drafts are looked up in: earlier completions of the prompt, then the
    # sequence so far; `ngram.NOTHING` elsewhere. None: nothing is.
    said: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a row of a shaped call does to its logits."""

    row: int
    sampling: Sampling
    tokens: np.ndarray  # i32[n], all that are known of the sequence
    prompt: int  # of them
    steps: int  # tokens to sample in the call, forced ones included
    forced: Sequence[int] = ()  # by the grammar
    allowed: np.ndarray | None = None  # u32[words], behind those; None: all


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeRow:
    """A slot that takes part in a decode call."""

    slot: int
    position: int  # of the token that is fed first; read where `fresh` is given
    fresh: Fresh | None  # None: the slot's state is on the device
    table: Sequence[int]  # pages of the sequence that are not in its bundle's table


def pack_prefill(spans: Sequence[Span], shape: PrefillShape, rollout: RolloutConfig) -> np.ndarray:
    """i32[R, PREFILL_HEADER + pages + tokens], in a scored shape with room for one token more,
    the one behind a span; rows beyond `spans` of a place are padding."""
    rows = rollout.chunk // shape.tokens * shape.places
    width = PREFILL_HEADER + shape.pages + shape.tokens + shape.scored
    packed = np.zeros((rows, width), np.int32)
    packed[:, SLOT] = rollout.slots  # does not exist
    taken = rows_of_spans([span.slot for span in spans], shape.tokens, rollout)
    for index, span in zip(taken, spans, strict=True):
        row = packed[index]
        row[[SLOT, START, LENGTH]] = span.slot, span.start, len(span.tokens)
        table = span.table[: shape.pages]
        row[PREFILL_HEADER : PREFILL_HEADER + len(table)] = table
        first = PREFILL_HEADER + shape.pages
        row[first : first + len(span.tokens)] = span.tokens
        if shape.scored:
            row[first + len(span.tokens)] = span.following
    return packed


def pack_decode(
    rows: Sequence[DecodeRow],
    bundles: Sequence[Sequence[int]],
    shape: DecodeShape,
    rollout: RolloutConfig,
) -> np.ndarray:
    """i32[n]: a header and a table for each row, then a count and a table for each bundle, then
    of each row what was said, where drafts are looked up in that.

    `bundles` has the pages that all rows of a bundle read in common, of their first tokens.
    """
    wide = np.zeros((shape.rows, HEADER + shape.own), np.int32)
    wide[:, STOP:HEADER] = -1
    words, floats = wide.view(np.uint32), wide.view(np.float32)
    for row in rows:
        i, fresh = row_of(row.slot, shape.rows, rollout), row.fresh
        wide[i, STATE], wide[i, POSITION] = KEPT, row.position
        wide[i, HEADER : HEADER + len(row.table)] = row.table
        if fresh is not None:
            wide[i, [STATE, TOKEN, LIMIT, CHOICE]] = FRESH, fresh.token, fresh.limit, fresh.choice
            words[i, [SEED_HIGH, SEED_LOW]] = fresh.seed
            floats[i, TEMPERATURE] = fresh.temperature
            wide[i, STOP : STOP + len(fresh.stop_ids)] = fresh.stop_ids
    shared = np.zeros((shape.rows // rollout.bundle, 1 + shape.shared), np.int32)
    for bundle, pages in zip(shared, bundles, strict=False):
        bundle[0] = len(pages)
        bundle[1 : 1 + len(pages)] = pages
    parts = [wide.reshape(-1), shared.reshape(-1)]
    if rollout.speculate == "ngram" and not shape.shaped:
        said = np.zeros((shape.rows, 2 * rollout.context), np.int32)
        for row in rows:
            if row.fresh is not None and row.fresh.said is not None:
                said[row_of(row.slot, shape.rows, rollout)] = row.fresh.said
        parts.append(said.reshape(-1))
    return np.concatenate(parts)


def pack_settings(rows: Sequence[Asked], steps: int, shape: DecodeShape, page: int) -> np.ndarray:
    """i32[n], behind a decode packet: the settings of each row. Rows that nothing is said of ask
    for nothing, and sample `steps` tokens."""
    wide = np.full((shape.rows, shape.settings(page)), -1, np.int32)
    floats = wide.view(np.float32)
    wide[:, :SETTINGS] = 0
    wide[:, STEPS] = steps
    floats[:, [TOP_P, REPETITION]] = 1
    behind = np.cumsum([SETTINGS + 2 * BIASES, shape.steps, shape.words])
    for asked in rows:
        row, sampling, prompt = asked.row, asked.sampling, asked.prompt
        wide[row, [TOP_K, PROMPT, STEPS]] = sampling.top_k, prompt, asked.steps
        wide[row, STOP_FROM] = prompt + sampling.min_tokens
        floats[row, [TOP_P, MIN_P]] = sampling.top_p, sampling.min_p
        floats[row, PRESENCE] = sampling.presence_penalty
        floats[row, FREQUENCY] = sampling.frequency_penalty
        floats[row, REPETITION] = sampling.repetition_penalty
        for i, (token, bias) in enumerate(sampling.logit_bias, SETTINGS):
            wide[row, i], floats[row, BIASES + i] = token, bias
        _, forced, allowed, known = np.split(wide[row], behind)
        forced[: len(asked.forced)] = asked.forced
        if asked.allowed is not None:
            allowed[:] = asked.allowed.view(np.int32)
        known[: len(asked.tokens)] = asked.tokens
    return wide.reshape(-1)


def page_buckets(rollout: RolloutConfig, ratio: int) -> tuple[int, ...]:
    """Lengths of page tables: a ratio apart, the largest that of a whole sequence."""
    sizes = [rollout.sequence_pages]
    while not rollout.deterministic and sizes[-1] > 4:
        sizes.append(-(-sizes[-1] // ratio))
    return tuple(reversed(sizes))


def prefill_shapes(rollout: RolloutConfig) -> tuple[PrefillShape, ...]:
    """All that a prefill call can have."""
    tokens = [rollout.chunk]
    while not rollout.deterministic and tokens[-1] % 4 == 0 and tokens[-1] > 16:
        tokens.append(tokens[-1] // 4)
    return tuple(
        PrefillShape(tokens=size, pages=pages, places=rollout.dealt)
        for size in reversed(tokens)
        for pages in page_buckets(rollout, 4)
    )


def scored_shapes(rollout: RolloutConfig) -> tuple[PrefillShape, ...]:
    """All that a prefill call which tells log-probs can have, where `rollout` has any."""
    if rollout.prompt_logprobs is None:
        return ()
    return tuple(
        PrefillShape(tokens=rollout.chunk, pages=pages, scored=True, places=rollout.dealt)
        for pages in page_buckets(rollout, 4)
    )


def decode_shapes(rollout: RolloutConfig) -> tuple[DecodeShape, ...]:
    """All that a decode call can have."""
    cascade = rollout.bundle > 1 and not rollout.deterministic
    return tuple(
        DecodeShape(
            rows=rows,
            shared=shared,
            own=own,
            steps=rollout.decode_steps,
            drafts=drafts,
            places=rollout.dealt,
        )
        for drafts in rollout.depths
        for rows in row_buckets(rollout)
        for shared in (0, *(page_buckets(rollout, 4) if cascade else ()))
        for own in page_buckets(rollout, 2)  # every row has one: what is padding costs most
    )


def shaped_shapes(rollout: RolloutConfig, vocab: int) -> tuple[DecodeShape, ...]:
    """All that a shaped call can have, where `rollout` has any."""
    sizes = {"shared": 0, "steps": rollout.decode_steps, "drafts": 0, "words": -(-vocab // 32)}
    return tuple(
        DecodeShape(rows=rows, own=own, places=rollout.dealt, **sizes)
        for rows in row_buckets(rollout)
        for own in page_buckets(rollout, 4)
    )
