"""Prefill and transfer models, fitted to what was observed.

Observations flow in, one a prefill or transfer; models flow out. No coefficient is ever
negative, so that more work never costs less, and until enough was seen the prior speaks.
"""

from collections import deque
from dataclasses import astuple

import numpy as np
from scipy.optimize import nnls

from forge_jax.rollout.router.cost import Link, Prefill, prefill_sizes

KEPT = 256  # newest observations that a fit looks at
EVERY = 16  # observations between two fits
TRUST = 1e-3  # weight of the prior beside one observation


class _Regression:
    """Non-negative least squares of relative errors over the newest observations."""

    def __init__(self, prior: tuple[float, ...]):
        self.found = prior
        self._prior = np.array(prior)
        self._rows: deque[tuple[tuple[float, ...], float]] = deque(maxlen=KEPT)
        self._seen = 0

    def observe(self, sizes: tuple[float, ...], seconds: float) -> None:
        if seconds <= 0:
            return  # of a clock too coarse to tell
        self._rows.append((sizes, seconds))
        self._seen += 1
        if self._seen % EVERY == 0:
            self.found = self._fitted()

    def _fitted(self) -> tuple[float, ...]:
        sizes = np.array([row for row, _ in self._rows])
        seconds = np.array([taken for _, taken in self._rows])
        scale = np.maximum(np.abs(sizes).max(axis=0), 1e-12)  # columns of one magnitude
        rows = sizes / scale / seconds[:, None]
        # One weak row a coefficient says the prior, where observations say nothing of it.
        weak = np.sqrt(TRUST) / seconds.mean() * np.eye(len(scale))
        found, _ = nnls(
            np.concatenate([rows, weak]),
            np.concatenate([np.ones(len(rows)), weak @ (self._prior * scale)]),
        )
        return tuple((found / scale).tolist())


class PrefillFit:
    """The prefill model of an instance."""

    def __init__(self, prior: Prefill):
        self.model = prior
        self._regression = _Regression(astuple(prior))

    def observe(self, tokens: int, prefix: int, running: int, seconds: float) -> None:
        """A prompt of `tokens`, `prefix` of them cached, took `seconds` from its first to its
        last chunk, with `running` sequences decoding beside it."""
        self._regression.observe(prefill_sizes(tokens, prefix, running), seconds)
        base, token, pair, beside = self._regression.found
        self.model = Prefill(base=base, token=token, pair=pair, beside=beside)


class LinkFit:
    """The model of transfers from one kind of place."""

    def __init__(self, prior: Link):
        self._regression = _Regression((prior.latency, prior.token))

    def model(self, wait: float) -> Link:
        """With the wait that stands before the next one."""
        latency, token = self._regression.found
        return Link(latency=latency, token=token, wait=wait)

    def observe(self, tokens: int, seconds: float) -> None:
        """Pages of `tokens` took `seconds` to arrive, without the wait before them."""
        self._regression.observe((1.0, tokens), seconds)
