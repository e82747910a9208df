"""Denominators and comparisons are of the whole step, however it is merged and cut."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import agentic, make_sample

from forge_jax.config import LossConfig
from forge_jax.rl import anchors
from forge_jax.rl.averages import averaged, sample_weights
from forge_jax.rl.losses import LOSSES
from forge_jax.rl.parallel import gather, logprobs
from forge_jax.rl.step import StepConfig
from forge_jax.types import MicroBatch, Sample

CFG = StepConfig(model=MODEL, ratio_cap=1.5, attention="reference")
PER = {
    "token": LossConfig(),
    "sample": LossConfig(per="sample"),
    "episode": LossConfig(per="episode"),
    "group": LossConfig(per="group"),
    "constant": LossConfig(per="constant", constant=7.0),
}


def owned(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of five episodes in two groups, of different sizes; one trains nothing."""
    whose = [(4, 0), (4, 0), (4, 1), (9, 0), (9, 1), (9, 2)]
    nothing = make_sample(np.random.default_rng(0), [1, 2, 3], [0, 0, 0])
    found = [
        dataclasses.replace(sample, group=whose[i % 6][0], episode=whose[i % 6][1])
        for i, sample in enumerate(samples)
    ]
    return [*found, dataclasses.replace(nothing, group=11)]


@pytest.mark.parametrize("per", PER)
def test_the_mean_is_over_units_of_means_over_their_tokens(per: str) -> None:
    samples = owned(agentic(0, MODEL.vocab))
    rng = np.random.default_rng(1)
    values = [rng.normal(size=int(s.mask.sum())) for s in samples]
    weights = sample_weights(samples, PER[per])
    total = sum(len(v) for v in values)
    found = sum(w * v.sum() for w, v in zip(weights, values, strict=True)) / total

    units: dict[Any, list[np.ndarray]] = {}
    for i, (sample, value) in enumerate(zip(samples, values, strict=True)):
        episode = (sample.group, sample.episode)
        key = {"token": 0, "sample": i, "group": sample.group}.get(per, episode)
        if len(value):
            units.setdefault(key, []).append(value)
    means = [np.concatenate(v).sum() / (7 if per == "constant" else sum(map(len, v)))
             for v in units.values()]  # fmt: skip
    assert found == pytest.approx(np.mean(means), rel=1e-12)


def cut(sample: Sample) -> list[Sample]:
    """The same trained tokens as two samples, the first of which the second continues."""
    where = np.flatnonzero(sample.mask)
    middle = int(where[len(where) // 2])
    early, late = sample.mask.copy(), sample.mask.copy()
    early[middle:], late[:middle] = False, False
    end = int(where[-1]) + 1 if len(where) == 1 else middle
    first = {
        name: getattr(dataclasses.replace(sample, mask=early), name)[:end]
        for name in ("tokens", "mask", "old_logp", "advantage")
    }
    return [dataclasses.replace(sample, **first), dataclasses.replace(sample, mask=late)]


def longest(samples: Sequence[Sample]) -> int:
    """Tokens of the longest path: the least that a micro-batch can have."""
    return max(len(sample.tokens) for sample in samples)


def of(parts: Sequence[MicroBatch], cfg: StepConfig) -> Any:
    """Loss and gradients of parts that are weighted and compared."""
    found = gather(parameters(cfg.dtype), parts, cfg)
    return jax.device_get((found.loss, found.grads))


def assert_same(found: Any, wanted: Any, tolerance: float) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance, abs=1e-9)
    for x, y in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


@pytest.mark.parametrize("per", ["episode", "group", "constant"])
def test_an_episode_counts_the_same_however_it_is_cut_into_samples(per: str) -> None:
    samples = owned(agentic(0, MODEL.vocab))
    pieces = [piece for s in samples for piece in (cut(s) if s.mask.any() else [s])]
    assert sum(p.mask.sum() for p in pieces) == sum(s.mask.sum() for s in samples)
    wanted = of(averaged(packed(samples, "tree"), samples, PER[per]), CFG)
    found = of(averaged(packed(pieces, "tree", longest(pieces)), pieces, PER[per]), CFG)
    assert_same(found, wanted, 1e-4)


def compared(samples: Sequence[Sample], mode: str, budget: int, cfg: StepConfig) -> Any:
    """Loss and gradients where the anchor is another policy than that which is updated."""
    before = jax.tree.map(lambda x: x * 1.02, parameters())
    parts = averaged(packed(samples, mode, budget), samples, cfg.objective)
    return of(anchors.anchored(parts, logprobs(before, parts, cfg)), cfg)


@pytest.mark.parametrize("kind", ["gspo", "decoupled"])
def test_a_loss_of_whole_samples_is_the_same_in_every_merge_and_cut(kind: str) -> None:
    eps = {"eps_low": 0.02, "eps_high": 0.03}
    objective = LossConfig(kind=kind, anchor="trainer", per="episode", entropy=0.1, kl=0.3, **eps)
    cfg = dataclasses.replace(CFG, loss=LOSSES[kind], objective=objective)
    samples = owned(agentic(0, MODEL.vocab))
    wanted = compared(samples, "none", 192, cfg)
    assert_same(compared(samples, "tree", longest(samples), cfg), wanted, 1e-4)


def test_the_ratio_of_a_sample_is_the_mean_of_its_tokens_wherever_they_lie() -> None:
    samples = owned(agentic(0, MODEL.vocab))
    parts = packed(samples, "tree", longest(samples))
    assert len(parts) > 1
    rng = np.random.default_rng(0)
    logp, anchor = rng.normal(size=(2, sum(len(s.tokens) for s in samples)))
    places = np.arange(len(logp))
    for base, given in (
        (np.concatenate([s.old_logp for s in samples]), parts),
        (anchor, anchors.anchored(parts, [(places, anchor)])),
    ):
        ends = np.cumsum([len(s.tokens) for s in samples])
        wanted = {}
        for end, sample in zip(ends, samples, strict=True):
            where = end - len(sample.tokens) + np.flatnonzero(sample.mask)
            if len(where):
                wanted |= dict.fromkeys(where.tolist(), (logp - base)[where].mean())
        found = anchors.sequenced(given, [(places, logp)])
        said = {}
        for tree in found:
            real = tree.occurrence_index >= 0
            sequence = tree.others["sequence"]
            assert not sequence[~real].any()
            said |= dict(zip(tree.occurrence_index[real].tolist(), sequence[real], strict=True))
        assert said == pytest.approx(wanted, rel=1e-6)
