"""Device calls for running requests.

Stays flow in, packed calls flow out, and the stays note what was asked for them. Invariant: a
row's table has the pages of its own sequence in order, and room for all that the call may write.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.packets import (
    Asked,
    DecodeRow,
    DecodeShape,
    PrefillShape,
    Span,
    decode_shapes,
    pack_decode,
    pack_prefill,
    pack_settings,
    prefill_shapes,
    scored_shapes,
    shaped_shapes,
)
from forge_jax.rollout.placement import common
from forge_jax.rollout.plans import Decode, Part, Prefill
from forge_jax.rollout.prefix import Node
from forge_jax.rollout.rows import fit, row_of, rows_for, rows_of_spans

# Puts what is computed of the first n tokens of a stay where others find it.
Publish = Callable[[Stay, int], list[tuple[int, Node]]]


def plan_prefill(stays: Sequence[Stay], publish: Publish, cfg: RolloutConfig) -> Prefill | None:
    """The next call that computes prompts, of `stays` in the order that they are to be served.

    What the first of them needs decides how many tokens a row has, and whether the call tells
    log-probs; rows go to those who need as many, then to others, for some of theirs.
    """
    unfilled = [stay for stay in stays if stay.filled < stay.target]
    if not unfilled:
        return None
    scored = unfilled[0].job.scoring
    unfilled = [stay for stay in unfilled if stay.job.scoring == scored]
    sizes = _prefill_sizes(cfg, "tokens", scored)

    def tokens_of(stay: Stay) -> int:
        return fit(min(stay.target - stay.filled, sizes[-1]), sizes)

    tokens = tokens_of(unfilled[0])
    unfilled.sort(key=lambda stay: tokens_of(stay) != tokens)
    chosen = _first_of_places(unfilled, cfg.chunk // tokens, cfg)
    lengths = [min(tokens, stay.target - stay.filled) for stay in chosen]
    spans = [
        Span(
            slot=stay.slot,
            start=stay.filled,
            tokens=stay.job.tokens[stay.filled : stay.filled + length],
            table=stay.table,
            following=int(stay.job.tokens[stay.filled + length]),
        )
        for stay, length in zip(chosen, lengths, strict=True)
    ]
    pages = max(-(-(span.start + len(span.tokens)) // cfg.page) for span in spans)
    size = fit(pages, _prefill_sizes(cfg, "pages", scored))
    shape = PrefillShape(tokens=tokens, pages=size, scored=scored, places=cfg.dealt)
    packet = pack_prefill(spans, shape, cfg)
    rows = rows_of_spans([span.slot for span in spans], tokens, cfg)
    parts = []
    for row, stay, length in zip(rows, chosen, lengths, strict=True):
        start, stay.filled = stay.filled, stay.filled + length
        published = tuple(publish(stay, stay.filled))
        part = Part(row=row, stay=stay, start=start, length=length, published=published)
        parts.append(part)
    return Prefill(shape=shape, packet=packet, parts=tuple(parts))


def _first_of_places(stays: Sequence[Stay], rows: int, cfg: RolloutConfig) -> Sequence[Stay]:
    """The first stays of every place, as many as it has rows."""
    if cfg.dealt == 1:
        return stays[:rows]
    taken, chosen = [0] * cfg.dealt, []
    for stay in stays:
        taken[stay.place] += 1
        if taken[stay.place] <= rows:
            chosen.append(stay)
    return chosen


@cache
def _prefill_sizes(cfg: RolloutConfig, name: str, scored: bool) -> tuple[int, ...]:
    """What one field of a prefill call's shape can be, ascending."""
    shapes = scored_shapes(cfg) if scored else prefill_shapes(cfg)
    return tuple(sorted({vars(shape)[name] for shape in shapes}))


@cache
def _decode_sizes(cfg: RolloutConfig, name: str) -> tuple[int, ...]:
    """What one field of a decode call's shape can be, ascending."""
    return tuple(sorted({vars(shape)[name] for shape in decode_shapes(cfg)}))


def window(cfg: RolloutConfig, drafts: int) -> int:
    """Tokens that a decode call of so many drafts samples of a row at most."""
    return cfg.decode_steps * (1 + drafts)


def reach(stay: Stay, cfg: RolloutConfig, drafts: int) -> int:
    """Tokens of a stay's sequence that its next decode call may know, feed or write over."""
    return min(stay.job.length + stay.most + window(cfg, drafts), stay.job.total)


def plan_decode(
    stays: Sequence[Stay],
    drafts: int,
    cfg: RolloutConfig,
    said: Callable[[Job], np.ndarray | None],
    vocab: int,
) -> Decode:
    """A call that samples in all of `stays`, with `drafts` tokens guessed before each step, where
    they are looked up in what is `said` of a job."""
    rows = rows_for((stay.slot for stay in stays), cfg)
    owners: list[Stay | None] = [None] * rows
    for stay in stays:
        owners[row_of(stay.slot, rows, cfg)] = stay
    if any(stay.job.sampling.shaped for stay in stays):
        return _shaped(stays, owners, cfg, vocab)
    counts = _shared(owners, cfg)
    own = 0
    for row, owner in enumerate(owners):
        if owner is not None:
            own = max(own, -(-reach(owner, cfg, drafts) // cfg.page) - counts[row // cfg.bundle])
    shape = DecodeShape(
        rows=rows,
        shared=fit(max(counts), _decode_sizes(cfg, "shared")),
        own=fit(own, _decode_sizes(cfg, "own")),
        steps=cfg.decode_steps,
        drafts=drafts,
        places=cfg.dealt,
    )
    bundles: list[list[int]] = [[] for _ in counts]
    packed = []
    for stay in stays:
        bundle = row_of(stay.slot, rows, cfg) // cfg.bundle
        table, count = stay.table, counts[bundle]
        bundles[bundle] = table[:count]
        packed.append(_row(stay, table[count : count + shape.own], said))
        stay.on_device = True
        stay.least += cfg.decode_steps
        stay.most += cfg.decode_steps * (1 + drafts)
    packet = pack_decode(packed, bundles, shape, cfg)
    return Decode(shape=shape, packet=packet, owners=tuple(owners))


def _shaped(
    stays: Sequence[Stay], owners: Sequence[Stay | None], cfg: RolloutConfig, vocab: int
) -> Decode:
    """A call for `stays` of which some change their logits. What these have is known: no call
    with them is unread when the next one is planned, see `Scheduler.stepwise`. It is as long as
    the grammars among them can tell what comes."""
    own = max(-(-reach(stay, cfg, 0) // cfg.page) for stay in stays)
    shapes = (each for each in shaped_shapes(cfg, vocab) if each.rows == len(owners))
    shape = next(each for each in shapes if each.own >= own)
    rows = [_row(stay, stay.table[: shape.own], lambda _: None) for stay in stays]
    matchers = [stay.job.matcher for stay in stays]
    steps = max((m.steps for m in matchers if m is not None), default=shape.steps)
    asked = [
        _asked(stay, row_of(stay.slot, shape.rows, cfg), steps)
        for stay in stays
        if stay.job.sampling.shaped
    ]
    for stay in stays:
        stay.on_device = False  # no drafter has seen what is sampled here
        stay.least += shape.steps
        stay.most += shape.steps
    settings = pack_settings(asked, steps, shape, cfg.page)
    packet = np.concatenate([pack_decode(rows, [], shape, cfg), settings])
    return Decode(shape=shape, packet=packet, owners=tuple(owners))


def _asked(stay: Stay, row: int, steps: int) -> Asked:
    job, matcher = stay.job, stay.job.matcher
    return Asked(
        row=row,
        sampling=job.sampling,
        tokens=job.tokens[: job.length],
        prompt=job.prompt,
        steps=steps if matcher is None else matcher.steps,
        forced=() if matcher is None else matcher.forced,
        allowed=None if matcher is None else matcher.allowed,
    )


def _row(stay: Stay, table: Sequence[int], said: Callable[[Job], np.ndarray | None]) -> DecodeRow:
    job, fresh = stay.job, None
    if not stay.on_device:
        fresh = dataclasses.replace(job.row(), said=said(job))
    return DecodeRow(slot=stay.slot, position=stay.job.length - 1, fresh=fresh, table=table)


def _shared(owners: Sequence[Stay | None], cfg: RolloutConfig) -> list[int]:
    """Pages that every bundle reads once for its rows; none if that saves nothing anywhere."""
    counts, saves = [], False
    for first in range(0, len(owners), cfg.bundle):
        stays = [stay for stay in owners[first : first + cfg.bundle] if stay is not None]
        counts.append(common(stays) if stays else 0)
        saves |= len(stays) > 1 and counts[-1] > 0
    return counts if saves and not cfg.deterministic else [0] * len(counts)
