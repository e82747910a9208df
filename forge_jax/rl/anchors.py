"""Log-probs that a loss compares occurrences with, beside the sampler's.

Micro-batches and log-probs of a forward pass over them go in; the micro-batches come out with
more of each occurrence in `PackedTree.others`: "anchor", its log-prob under the trainer's policy
before the first update of a batch, "reference", its log-prob under the policy that the loss holds
it near, and "sequence", the mean of logp - anchor over the trained tokens of its sample. All are of
whole samples of the step, whatever micro-batch, block or rank holds their occurrences.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forge_jax.rl.forward import StepConfig
from forge_jax.rl.losses import gspo
from forge_jax.sched.split import forest_of
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

Logps = Iterable[tuple[np.ndarray, Any]]  # places among the samples, -1 at padding; log-probs


def anchored(parts: Sequence[MicroBatch], found: Logps) -> list[MicroBatch]:
    """`parts` with the log-probs `found` as the anchor of each occurrence."""
    return _placed(parts, "anchor", found)


def referenced(parts: Sequence[MicroBatch], found: Logps) -> list[MicroBatch]:
    """`parts` with the log-probs `found` as the reference of each occurrence."""
    return _placed(parts, "reference", found)


def wants_sequences(parts: Sequence[MicroBatch], cfg: StepConfig) -> bool:
    """True where `cfg.loss` looks at ratios of samples that are not 1 by construction."""
    moved = any("anchor" in forest_of(part).others for part in parts)
    return cfg.loss is gspo and (moved or not cfg.objective.recomputed)


def sequenced(parts: Sequence[MicroBatch], found: Logps) -> list[MicroBatch]:
    """`parts` with the log ratio of each occurrence's sample, by the log-probs `found`.

    The ratio is to the anchor where there is one, else to the sampler.
    """
    logp = _by_place(found)
    trees = [forest_of(part) for part in parts]
    real = [tree.occurrence_index >= 0 for tree in trees]
    sample, delta = (
        np.concatenate([x[where] for x, where in zip(of, real, strict=True)])
        for of in (
            [tree.occurrence_sample for tree in trees],
            [logp[t.occurrence_index] - t.others.get("anchor", t.old_logp) for t in trees],
        )
    )
    total, count = np.bincount(sample, weights=delta), np.bincount(sample)
    mean = (total / np.maximum(1, count)).astype(logp.dtype)
    return _with(parts, "sequence", lambda tree: mean[tree.occurrence_sample])


def _placed(parts: Sequence[MicroBatch], name: str, found: Logps) -> list[MicroBatch]:
    logp = _by_place(found)
    return _with(parts, name, lambda tree: logp[tree.occurrence_index])


def _by_place(found: Logps) -> np.ndarray:
    """What a forward pass found, [L], each at its token's place among the samples."""
    pieces = [(index, np.asarray(logp)) for index, logp in found]
    length = 1 + max(int(index.max(initial=-1)) for index, _ in pieces)
    flat = np.zeros(length, pieces[0][1].dtype)
    for index, logp in pieces:
        flat[index[index >= 0]] = logp[index >= 0]
    return flat


def _with(
    parts: Sequence[MicroBatch], name: str, values: Callable[[PackedTree], np.ndarray]
) -> list[MicroBatch]:
    def told(tree: PackedTree) -> PackedTree:
        own = np.where(tree.occurrence_index >= 0, values(tree), 0)
        return replace(tree, others={**tree.others, name: own})

    return [
        replace(part, tree=told(part.tree)) if isinstance(part, CarriedTree) else told(part)
        for part in parts
    ]
