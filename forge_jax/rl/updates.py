"""Several updates from one batch: minibatches of whole groups, and passes over them.

A batch's groups of samples go in; minibatches of packed micro-batches come out, one for each
update. Places of occurrences count over the whole batch throughout, and what is recomputed as an
anchor is so once, under the weights before the first update, as is what a reference makes of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_jax.config import Skip
from forge_jax.rl.anchors import Logps, anchored, referenced
from forge_jax.rl.forward import StepConfig
from forge_jax.rl.parallel import logprobs
from forge_jax.rl.step import Updated
from forge_jax.types import CarriedTree, MicroBatch, PackedTree, Sample


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one update is of; the next one begins where it ends."""

    samples: int  # of the batch
    parts: tuple[MicroBatch, ...]


def dealt(groups: Sequence[int], updates: int, seed: Sequence[int]) -> list[list[int]]:
    """Places of the `groups` that train something, `updates` lists as long as one another, or one
    longer; shuffled by `seed`. Each group has a number of samples."""
    if updates == 1:
        return [list(range(len(groups)))]
    full = np.flatnonzero(groups)
    order = np.random.default_rng(list(seed)).permutation(full)
    return [sorted(part.tolist()) for part in np.array_split(order, updates)]


def laid(
    minibatches: Sequence[Sequence[Sample]],
    pack: Callable[[Sequence[Sample]], Sequence[MicroBatch]],
) -> tuple[Minibatch, ...]:
    """Each minibatch as `pack` makes micro-batches of it, its places behind those before it."""
    made, samples, tokens = [], 0, 0
    for own in minibatches:
        parts = tuple(_behind(part, samples, tokens) for part in pack(own))
        made.append(Minibatch(samples=len(own), parts=parts))
        samples, tokens = samples + len(own), tokens + sum(len(s.tokens) for s in own)
    return tuple(made)


def _behind(part: MicroBatch, samples: int, tokens: int) -> MicroBatch:
    if isinstance(part, CarriedTree):
        return replace(part, tree=_moved(part.tree, samples, tokens))
    return _moved(part, samples, tokens)


def _moved(tree: PackedTree, samples: int, tokens: int) -> PackedTree:
    real = tree.occurrence_index >= 0
    return replace(
        tree,
        occurrence_sample=np.where(real, tree.occurrence_sample + samples, 0).astype(np.int32),
        occurrence_index=np.where(real, tree.occurrence_index + tokens, -1),
    )


def compared(
    minibatches: Sequence[Minibatch],
    params: Any,
    epochs: int,
    cfg: StepConfig,
    reference: Any = None,
) -> list[Minibatch]:
    """The minibatches of `epochs` passes in order, with log-probs under `params`, the weights
    before the first of their updates, where the loss compares later ones with these; and under
    those of a `reference`, unless it is None."""
    told = list(minibatches)
    if cfg.objective.recomputed and len(told) * epochs > 1:
        told = _told(told, anchored, params, cfg)
    if reference is not None:
        told = _told(told, referenced, reference, cfg)
    return told * epochs


def _told(
    minibatches: Sequence[Minibatch],
    tell: Callable[[Sequence[MicroBatch], Logps], list[MicroBatch]],
    params: Any,
    cfg: StepConfig,
) -> list[Minibatch]:
    """`minibatches` as `tell` makes them with their log-probs under `params`."""
    return [
        replace(one, parts=tuple(tell(one.parts, logprobs(params, one.parts, cfg))))
        if one.parts
        else one
        for one in minibatches
    ]


def together(done: Sequence[Updated], minibatches: int) -> Updated:
    """What the updates of a batch came to: means of numbers, and the log-probs of the first pass,
    each under the weights before its own update; both of what was finite, if anything was.

    `skipped` is why the first of them was that was.
    """
    if len(done) == 1:
        return done[0]
    finite = [one for one in done if one.skipped is not Skip.NON_FINITE]
    told = [one for one in finite if one.metrics] or list(done)
    shown = [one for one in done[:minibatches] if one in finite] or done[:minibatches]
    metrics = {
        name: (max if name == "ratio_max" else np.mean)([float(one.metrics[name]) for one in told])
        for name in told[0].metrics
        if all(name in one.metrics for one in told)
    }
    return Updated(
        stepped=any(one.stepped for one in done),
        skipped=next((one.skipped for one in done if one.skipped is not None), None),
        loss=float(np.mean([one.loss for one in told])),
        grad_norm=float(np.mean([one.grad_norm for one in told])),
        metrics={name: float(value) for name, value in metrics.items()},
        logp=np.concatenate([one.logp for one in shown]),
        index=np.concatenate([one.index for one in shown]),
        seconds=sum(one.seconds for one in done),
    )


def token_counts(done: Sequence[Updated], minibatches: int) -> dict[str, int]:
    """Of the tokens of a batch, those that any of its updates took and those that were skipped."""
    counts = {"tokens_trained": 0, "tokens_skipped": 0}
    for at in range(minibatches):
        taken = any(one.stepped for one in done[at::minibatches])
        counts["tokens_trained" if taken else "tokens_skipped"] += len(done[at].logp)
    return counts
