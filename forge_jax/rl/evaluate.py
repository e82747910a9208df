"""Held-out evaluation: tasks go in, the share that the policy solves comes out.

Every episode is played through the gateway, as in training. Environment faults are
counted apart: they say nothing about the policy.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_jax.types import Episode, Status, Task

SOLVED = 1.0 - 1e-6  # a reward that counts as success
RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What held-out play came to; rates are over episodes without environment faults."""

    episodes: int
    success: float
    success_ci: tuple[float, float]  # 95 % bootstrap interval, over tasks
    mean_turns: float
    tokens_sampled: int
    seconds_mean: float  # of an episode, from its first call to the end of its last
    failures: int  # environment faults
    faults: Mapping[str, float] = field(default_factory=dict)  # of a call, those asked for


class NothingPlayed(Exception):
    """Every agent failed, the first one as the message says: no word about the policy."""


def held_out(family: str, tasks: int, seed: int, level: int = 0) -> list[Task]:
    """The tasks of an evaluation: the same for the same arguments."""
    start = seed * 1_000_003  # evaluations of different seeds do not overlap
    return [Task(family=family, seed=start + i, split="eval", level=level) for i in range(tasks)]


async def played(
    tasks: Sequence[Task],
    play: Callable[[int, Task], Awaitable[Episode]],
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Plays every task once, at most `concurrency` at a time; `advance` is called after each.

    Raises NothingPlayed if every agent failed: then it, or the server it calls, is broken.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, task: Task) -> Episode:
        async with places:
            episode = await play(number, task)
        advance()
        return episode

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(i, task)) for i, task in enumerate(tasks)]
    episodes = [task.result() for task in running]
    if all(e.outcome.status is Status.AGENT_FAILED for e in episodes):
        raise NothingPlayed(f"every episode failed, the first by {episodes[0].outcome.error}")
    return episodes


def summarise(episodes: Sequence[Episode]) -> Evaluation:
    """Reduces played episodes to an `Evaluation`."""
    kept = kept_of(episodes)
    tasks = by_task(kept)
    solved = np.array([sum(map(is_solved, own)) for own in tasks], np.float64)
    counts = np.array([len(own) for own in tasks], np.float64)
    return Evaluation(
        episodes=len(episodes),
        success=float(solved.sum() / counts.sum()) if len(kept) else 0.0,
        success_ci=bootstrap(solved, counts),
        mean_turns=mean_of(turns_of, kept),
        tokens_sampled=int(sum(map(sampled_of, episodes))),
        seconds_mean=mean_of(seconds_of, kept),
        failures=len(episodes) - len(kept),
    )


def kept_of(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that say something about the policy."""
    return [e for e in episodes if e.outcome.status is not Status.ENVIRONMENT_FAILED]


def by_task(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The episodes of each task, in the order of the tasks."""
    together: dict[Task, list[Episode]] = {}
    for episode in episodes:
        together.setdefault(episode.task, []).append(episode)
    return list(together.values())


def is_solved(episode: Episode) -> bool:
    return episode.outcome.valid and episode.outcome.reward >= SOLVED


def mean_of(measure: Callable[[Episode], float], episodes: Sequence[Episode]) -> float:
    """0 of no episodes."""
    return float(np.mean([measure(episode) for episode in episodes])) if episodes else 0.0


def turns_of(episode: Episode) -> float:
    return counted(episode, "turns", len(episode.turns))


def sampled_of(episode: Episode) -> float:
    """Tokens sampled."""
    tokens = sum(len(turn.output) for turn in episode.turns)
    return counted(episode, "completion_tokens", tokens)


def seconds_of(episode: Episode) -> float:
    """Seconds from the start of an episode to the end of its last call."""
    end = max([turn.start + turn.seconds for turn in episode.turns], default=0.0)
    return counted(episode, "seconds", end)


def counted(episode: Episode, measure: str, recorded: float) -> float:
    """What our gateway recorded of an episode, or else what its agent measured itself."""
    return recorded if episode.turns else episode.outcome.metrics.get(measure, 0.0)


def bootstrap(totals: np.ndarray, counts: np.ndarray | None = None) -> tuple[float, float]:
    """95 % percentile interval of ``sum(totals) / sum(counts)``, by resampling the pairs.

    `totals` [n] of `counts` [n] values each, one where there are no counts: then it is that of the
    mean. (0, 0) when empty.
    """
    n = len(totals)
    if n == 0:
        return 0.0, 0.0
    counts = np.ones(n) if counts is None else counts
    draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    means = totals[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
