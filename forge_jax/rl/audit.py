"""Does the trainer reproduce the engine?

Sampled calls go in; how far their log-probs are from the trainer's, computed under the
same weights that sampled them, comes out. Only calls that no weight update crossed count:
every token of them, and every key and value they read, is of one version.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.lora import tuned
from forge_jax.rl.parallel import logprobs
from forge_jax.rl.step import StepConfig, Updated, scatter
from forge_jax.types import MicroBatch, Sample, Turn


class Audit:
    """Keeps copies of the newest weights, to look at what they sampled when it is trained."""

    def __init__(self, keep: int, base: Any = None):
        """`keep` copies at most; with 0 only calls of the weights being trained are checked.
        With a `base` they are of its adapters."""
        self._keep = keep
        self._base = base
        self._past: dict[int, Any] = {}

    def remember(self, version: int, params: Any) -> None:
        """Copies `params`, which the next update will consume."""
        if self._keep:
            self._past[version] = _copied(params)
        for old in sorted(self._past)[: -self._keep]:
            del self._past[old]

    def gap(
        self,
        samples: Sequence[Sample],
        turns: Sequence[Turn],
        trees: Sequence[MicroBatch],
        version: int,
        done: Updated,
        cfg: StepConfig,
    ) -> dict[str, Any]:
        """Largest |log-prob of the trainer - of the engine|, and of which calls.

        `done` has the log-probs under `version`, the weights just trained. If those sampled
        no call whole, the kept version that sampled most is computed anew.
        """
        calls = Counter(v for v in map(only_version, turns) if v is not None)
        kept = [v for v in (version, *self._past) if calls[v]]
        nothing = {"logp_gap_max": None, "logp_gap_calls": 0, "logp_gap_version": None}
        if not kept:
            return nothing
        chosen = version if calls[version] else max(kept, key=lambda v: calls[v])
        length = sum(len(s.tokens) for s in samples)
        logp = scatter(done.logp, done.index, length)
        if chosen != version:
            logp = recomputed(tuned(self._base, self._past[chosen]), trees, length, cfg)
        return {
            "logp_gap_max": largest_gap(samples, turns, chosen, logp),
            "logp_gap_calls": calls[chosen],
            "logp_gap_version": chosen,
        }


def only_version(turn: Turn) -> int | None:
    """The version that sampled every token of a call, or None."""
    first = int(turn.versions[0])
    return first if np.all(turn.versions == first) else None


def recomputed(
    params: Any, trees: Sequence[MicroBatch], length: int, cfg: StepConfig
) -> np.ndarray:
    """Log-probs f32[L] under `params`, each in its token's place among the samples."""
    logp = np.zeros(length, np.float32)
    for index, found in logprobs(params, trees, cfg):
        logp[index[index >= 0]] = np.asarray(found)[index >= 0]
    return logp


def largest_gap(
    samples: Sequence[Sample], turns: Sequence[Turn], version: int, logp: np.ndarray
) -> float:
    """max |logp - old_logp| over the calls that `version` sampled whole."""
    ends = np.cumsum([len(s.tokens) for s in samples])
    return max(
        float(np.abs(logp[end - len(s.tokens) : end] - s.old_logp)[s.mask].max(initial=0))
        for s, turn, end in zip(samples, turns, ends, strict=True)
        if only_version(turn) == version
    )


@jax.jit
def _copied(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)
