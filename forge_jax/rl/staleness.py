"""How far the policy that is trained is from what sampled its tokens.

Log-probs of trained tokens under both, and the version that sampled each, go in; numbers for a
row of metrics come out. All is computed on the host, in float64, from what an update returns
anyway.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_jax.types import Sample, Turn

QUANTILES = {"p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def log_ratios(samples: Sequence[Sample], logp: np.ndarray, index: np.ndarray) -> np.ndarray:
    """log(trainer / sampler) f64[M] of the tokens at `index` [M] in the concatenated samples,
    whose log-probs under the trainer are `logp` [M]."""
    sampled = np.concatenate([sample.old_logp for sample in samples])[index]
    return logp.astype(np.float64) - sampled


def effective(log_weights: np.ndarray) -> float:
    """Kish's effective sample size as a share, ``(Σw)² / (n Σw²)``, of weights given as logs [n].

    1 where all are equal, 1/n where one outweighs the others.
    """
    weights = np.exp(log_weights - np.max(log_weights))
    return float(np.sum(weights) ** 2 / (len(weights) * np.sum(weights**2)))


def k3(log_ratio: np.ndarray) -> float:
    """KL of the sampler from the trainer, nats a token: the mean of ``r - 1 - log r``."""
    with np.errstate(over="ignore"):  # to inf, which is beyond any limit
        return float(np.mean(np.expm1(log_ratio) - log_ratio))


def staleness_row(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    logp: np.ndarray,
    index: np.ndarray,
    version: int,
) -> dict[str, Any]:
    """Effective sample sizes, quantiles of ratios, and ratios by the age of tokens.

    `logp` [M] are of the trained tokens at `index` [M] of the concatenated samples, under weights
    `version`; `turns` are the samples' calls. The weight of a sample is the product of its
    tokens' ratios, or with ``ess_mean`` their geometric mean.
    """
    delta = log_ratios(samples, logp, index)
    owner = np.repeat(np.arange(len(samples)), [len(sample.tokens) for sample in samples])[index]
    tokens = np.bincount(owner, minlength=len(samples))
    sums = np.bincount(owner, delta, minlength=len(samples))[tokens > 0]
    with np.errstate(over="ignore"):
        ratio = np.exp(delta)
    values = np.quantile(ratio, list(QUANTILES.values()))
    age = version - np.concatenate([sampled_by(*pair) for pair in zip(samples, turns, strict=True)])
    return {
        "ess_token": effective(delta),
        "ess_sample": effective(sums),
        "ess_mean": effective(sums / tokens[tokens > 0]),
        **{f"ratio_{name}": float(x) for name, x in zip(QUANTILES, values, strict=True)},
        **by_age(age[index], np.abs(ratio - 1)),
    }


def sampled_by(sample: Sample, turn: Turn) -> np.ndarray:
    """i64[T], the version that sampled each token of a sample; 0 in its prompt."""
    versions = np.zeros(len(sample.tokens), np.int64)
    start = len(turn.prompt)
    versions[start : start + len(turn.output)] = turn.versions
    return versions


def by_age(age: np.ndarray, gap: np.ndarray) -> dict[str, Any]:
    """The share of tokens of each age [M], in updates, and their mean `gap` [M], |ratio - 1|."""
    ages, group, counts = np.unique(age, return_inverse=True, return_counts=True)
    names = [str(a) for a in ages]
    means = np.bincount(group, gap) / counts
    return {
        "age_mean": float(np.mean(age)),
        "age_max": int(ages[-1]),
        "age_share": dict(zip(names, (counts / len(age)).tolist(), strict=True)),
        "age_gap": dict(zip(names, means.tolist(), strict=True)),
    }
