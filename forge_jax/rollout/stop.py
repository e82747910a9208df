"""Finds where a completion is to end: stop strings, and runs of near-certain tokens.

Token ids or log-probs flow in, the number of tokens to keep flows out. The outcome depends on
these alone, never on how they were cut into calls.
"""

import math
from collections.abc import Sequence

import numpy as np

from forge_jax.config import CertainConfig
from forge_jax.models.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Watches the text of one completion for the first of several strings."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer):
        self._strings = strings
        self._text = Detokenizer(tokenizer)
        self._keep = max(map(len, strings)) - 1  # characters that may begin a stop string
        self._tail = ""

    def feed(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Reads tokens up to the one that completes a stop string.

        Returns how many of `ids` were read and the string, or None if all were read
        and no string is complete.
        """
        for count, token in enumerate(ids, 1):
            found = self._search(self._text.feed([token]))
            if found is not None:
                return count, found
        return None

    def flush(self) -> str | None:
        """The stop string in text that was still held back when the completion ended."""
        return self._search(self._text.flush())

    def _search(self, text: str) -> str | None:
        window = self._tail + text
        places = [(window.find(s), s) for s in self._strings if s in window]
        if places:
            return min(places, key=lambda place: place[0])[1]
        self._tail = window[max(0, len(window) - self._keep) :] if self._keep else ""
        return None


class CertainRun:
    """Watches the log-probs of one completion for so many near-certain tokens in a row (after
    MiniMax-M1, arXiv 2506.13585): a text that loops goes on so to its limit."""

    def __init__(self, cfg: CertainConfig):
        self._tokens = cfg.tokens
        self._least = math.log(cfg.p)
        self._run = 0  # tokens of it so far

    def feed(self, logprobs: np.ndarray) -> int | None:
        """How many of f32[n] `logprobs` were read when the run was complete; None if it is not."""
        for count, certain in enumerate((logprobs > self._least).tolist(), 1):
            self._run = self._run + 1 if certain else 0
            if self._run >= self._tokens:
                return count
        return None


def certain_run(cfg: CertainConfig) -> CertainRun | None:
    """What watches a new completion; None where none is cut off."""
    return CertainRun(cfg) if cfg.tokens else None
