"""A task small enough to enumerate: look for something, or stop and answer.

A policy comes in, every episode there can be comes out, with its probability and the score of
each of its calls; so gradients and moments of their estimates are sums, not samples. An episode
has up to three calls. A look costs its process reward and three seconds, and finds what is
sought half the time; an answer takes one second and is right at `RIGHT[found]`. Who looks three
times has not answered. The policy has one logit for each number of call and for what is known.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forge_jax.types import Episode, Finish, Outcome, Status, Task, Turn

CALLS = 3
FINDS = 0.5
RIGHT = (0.3, 0.9)  # of an answer before and after the find
LOGITS = CALLS * 2


@dataclass(frozen=True, kw_only=True)
class Path:
    """One course of an episode."""

    looks: tuple[bool, ...]  # of each call: a look, or the answer
    found: tuple[bool, ...]  # of each call: found before it
    right: bool

    @property
    def luck(self) -> float:
        """Probability of what the policy has no say in."""
        chance, answered = 1.0, not self.looks[-1]
        for before, after in itertools.pairwise(self.found):
            chance *= 1.0 if before else (FINDS if after else 1 - FINDS)
        if answered:
            p = RIGHT[self.found[-1]]
            chance *= p if self.right else 1 - p
        return chance


def paths() -> list[Path]:
    """Every course of an episode."""
    return list(_paths((), (False,)))


def _paths(looks: tuple[bool, ...], found: tuple[bool, ...]) -> Iterator[Path]:
    for right in (False, True):
        yield Path(looks=(*looks, False), found=found, right=right)
    if len(found) == CALLS:
        yield Path(looks=(*looks, True), found=found, right=False)
        return
    for then in (True,) if found[-1] else (False, True):
        yield from _paths((*looks, True), (*found, then))


def policy(logits: np.ndarray, all_paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities f64[M] of the paths and scores f64[M, CALLS, LOGITS] of their calls, 0 after
    the last; `logits` f64[LOGITS] of a look."""
    look = 1 / (1 + np.exp(-logits))
    chances, scores = np.ones(len(all_paths)), np.zeros((len(all_paths), CALLS, LOGITS))
    for m, path in enumerate(all_paths):
        chances[m] = path.luck
        for t, (looks, found) in enumerate(zip(path.looks, path.found, strict=True)):
            state = 2 * t + found
            chances[m] *= look[state] if looks else 1 - look[state]
            scores[m, t, state] = looks - look[state]
    return chances, scores


def episode(path: Path) -> Episode:
    """A path as the trainer would find it in the pool: a look is a call with a fault, and the
    prompt says what the state is."""
    turns = tuple(
        Turn(
            prompt=np.array([t, found], np.int32), output=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32), temperature=1.0,
            finish=Finish.STOP, parent=None, start=3.0 * t, seconds=3.0 if looks else 1.0,
            queue_seconds=0.0, malformed=int(looks),
        )
        for t, (looks, found) in enumerate(zip(path.looks, path.found, strict=True))
    )  # fmt: skip
    outcome = Outcome(status=Status.COMPLETED, reward=float(path.right))
    return Episode(
        item=0, replica=0, task=Task(family="stop", seed=0), outcome=outcome, turns=turns
    )


def groups(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every multiset of `size` out of `count` paths, i64[N, size], and the logarithm of how many
    orders each has, f64[N]."""
    members = np.array(list(itertools.combinations_with_replacement(range(count), size)))
    repeats = (members[:, :, None] == np.arange(count)).sum(axis=1)
    orders = math.lgamma(size + 1) - np.vectorize(math.lgamma)(repeats + 1.0).sum(axis=1)
    return members, orders
