"""What a single call does wrong, measured on its own tokens and text.

A `Turn` goes in, the size of each fault in [0, 1] comes out; nothing of the episode around it or
of its siblings is looked at.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forge_jax.config import FaultConfig
from forge_jax.types import Finish, Turn

Decode = Callable[[Sequence[int]], str]


def faults(
    turn: Turn, decode: Decode, cfg: FaultConfig, scripts: Sequence[str]
) -> dict[str, float]:
    """The size of every fault in a call, 0 to 1, under the name of what it costs in `cfg`;
    `scripts` empty: any is right, and `language` is left out."""
    sizes = {
        "calls": bad_calls(turn),
        "unfinished": float(turn.finish is Finish.LENGTH),
        "repetition": repetition(turn.output, cfg.ngram),
        "certain": float(
            turn.temperature > 0  # else all tokens are said to be certain
            and longest_certain(turn.logprobs, cfg.certain_p) >= cfg.certain_tokens
        ),
    }
    if scripts:
        sizes["language"] = mixing(decode(turn.output.tolist()), scripts)
    return sizes


def process_reward(sizes: Mapping[str, float], cfg: FaultConfig) -> float:
    """Minus what the faults of a call cost; at most 0."""
    costs = {
        "calls": cfg.calls,
        "unfinished": cfg.unfinished,
        "repetition": cfg.repetition,
        "certain": cfg.certain,
        "language": cfg.language,
    }
    return 0.0 - sum(costs[name] * size for name, size in sizes.items())


def bad_calls(turn: Turn) -> float:
    """1 where a tool call of the reply cannot be read, names no offered tool or breaks the
    tool's schema."""
    return float(turn.malformed + turn.refused > 0)


def mixing(text: str, scripts: Sequence[str]) -> float:
    """Share of the letters of a text that are of no script in `scripts`; 0 without letters."""
    letters = [letter for letter in text if letter.isalpha()]
    foreign = sum(not unicodedata.name(one, "").startswith(tuple(scripts)) for one in letters)
    return foreign / len(letters) if letters else 0.0


def repetition(tokens: np.ndarray, n: int) -> float:
    """Share of the n-grams of i32[C] tokens that were there before; 0 where there is none."""
    if len(tokens) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def longest_certain(logprobs: np.ndarray, p: float) -> int:
    """The most tokens in a row whose probability was above p."""
    other = np.flatnonzero(~(logprobs > math.log(p)))
    borders = np.concatenate([[-1], other, [len(logprobs)]])
    return int(np.diff(borders).max()) - 1
