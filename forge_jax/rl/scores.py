"""How good held-out play was: pass@k, turns, tokens, seconds, and what episodes ended by.

Played episodes flow in, one or more of every task; means with 95 % bootstrap intervals flow out as
plain JSON. The invariant: tasks are resampled, each with all of its episodes, which are alike.
Episodes whose environment failed say nothing about the policy, and count among the ends alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forge_jax.rl.evaluate import (
    bootstrap,
    by_task,
    counted,
    is_solved,
    kept_of,
    sampled_of,
    seconds_of,
    turns_of,
)
from forge_jax.rl.rewards import OUTCOME, Scorer, fault_means, fault_sizes
from forge_jax.rl.speed import times_of
from forge_jax.types import Episode

ERRORS = 5  # most frequent ones that are told
ERROR_LENGTH = 160  # characters of one


def scores(episodes: Sequence[Episode], samples: int, scorer: Scorer = OUTCOME) -> dict[str, Any]:
    """What `samples` episodes of each task came to, beside what `summarise` tells of them;
    `scorer` says what a fault of a call is."""
    tasks = by_task(kept_of(episodes))
    recorded = any(episode.turns for episode in episodes)  # else the server is not ours
    row: dict[str, Any] = {"tasks": len(by_task(episodes)), "samples": samples}
    row |= passes(tasks, samples)
    for name, measure in MEASURES.items():
        if recorded or name != "seconds_completion_mean":
            row |= estimate(name, tasks, measure)
    calling = [[e for e in own if e.outcome.metrics.get("calling_replies")] for own in tasks]
    row |= parallel([own for own in calling if own])
    row |= faulty(tasks, scorer)
    row["ended"] = dict(Counter(str(episode.outcome.status) for episode in episodes))
    errors = Counter(e.outcome.error[:ERROR_LENGTH] for e in episodes if e.outcome.error)
    row["errors"] = dict(errors.most_common(ERRORS))
    return row


def estimate(
    name: str, tasks: Sequence[Sequence[Episode]], measure: Callable[[Episode], float]
) -> dict[str, Any]:
    """The mean of a measure over the episodes of all tasks, and its interval."""
    totals = np.array([sum(map(measure, own)) for own in tasks], np.float64)
    counts = np.array([len(own) for own in tasks], np.float64)
    mean = float(totals.sum() / counts.sum()) if len(tasks) else 0.0
    return {name: mean, f"{name}_ci": bootstrap(totals, counts)}


def parallel(tasks: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """Of replies with tool calls the share that have several, over episodes whose agents tell how
    many of both they had; nothing of none."""
    if not tasks:
        return {}
    several, calling = (
        np.array([sum(e.outcome.metrics[name] for e in own) for own in tasks], np.float64)
        for name in ("parallel_replies", "calling_replies")
    )
    share = float(several.sum() / calling.sum())
    return {"calls_parallel": share, "calls_parallel_ci": bootstrap(several, calling)}


def passes(tasks: Sequence[Sequence[Episode]], samples: int) -> dict[str, Any]:
    """pass@k of k = 1, 2, 4, ... and `samples`: means over the tasks with k episodes or more."""
    found: dict[str, Any] = {"pass_at": {}, "pass_at_ci": {}}
    counts = [(sum(map(is_solved, own)), len(own)) for own in tasks]
    for k in sorted({*(2**i for i in range(samples.bit_length())), samples}):
        each = np.array([pass_at(k, c, n) for c, n in counts if n >= k], np.float64)
        if len(each):
            found["pass_at"][str(k)] = float(each.mean())
            found["pass_at_ci"][str(k)] = bootstrap(each)
    return found


def pass_at(k: int, passed: int, played: int) -> float:
    """How likely one of `k` episodes of a task passes, where `passed` of `played` >= k did.

    Unbiased: the share of all choices of k of the episodes that have one that passed. Chen et al.,
    arXiv 2107.03374.
    """
    return 1.0 - math.comb(played - passed, k) / math.comb(played, k)


def faulty(tasks: Sequence[Sequence[Episode]], scorer: Scorer) -> dict[str, Any]:
    """Of every fault its mean size over the calls of all tasks, and its interval; nothing of
    episodes whose calls were not recorded."""
    found: dict[str, Any] = {"faults": {}, "faults_ci": {}}
    each = [[one for episode in own for one in fault_sizes(episode, scorer)] for own in tasks]
    each = [sizes for sizes in each if sizes]  # of tasks with calls
    counts = np.array([len(sizes) for sizes in each], np.float64)
    for name, size in fault_means([one for sizes in each for one in sizes]).items():
        totals = np.array([sum(one[name] for one in sizes) for sizes in each], np.float64)
        found["faults"][name] = size
        found["faults_ci"][name] = bootstrap(totals, counts)
    return found


def prompted_of(episode: Episode) -> float:
    """Tokens that the model read: those of a conversation count in each of its calls."""
    return counted(episode, "prompt_tokens", sum(len(turn.prompt) for turn in episode.turns))


def completion_of(episode: Episode) -> float:
    """Seconds from the first call to the end of the last, without those that waited for the
    engine."""
    return times_of(episode.turns).completion


MEASURES: dict[str, Callable[[Episode], float]] = {
    "mean_turns": turns_of,
    "tokens_sampled_mean": sampled_of,
    "tokens_prompt_mean": prompted_of,
    "seconds_mean": seconds_of,
    "seconds_completion_mean": completion_of,
}
