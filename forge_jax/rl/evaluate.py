"""Held-out evaluation: tasks go in, the share that the policy solves comes out.

Every episode is played through the gateway, as in training. Environment faults are
counted apart: they say nothing about the policy.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.types import Episode, Status, Task

SOLVED = 1.0 - 1e-6  # a reward that counts as success
RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What held-out play came to; rates are over episodes without environment faults."""

    episodes: int
    success: float
    success_ci: tuple[float, float]  # 95 % bootstrap interval
    mean_turns: float
    tokens_sampled: int
    seconds_mean: float  # of an episode, from its first call to the end of its last
    failures: int  # environment faults


class NothingPlayed(Exception):
    """Every agent failed, the first one as the message says: no word about the policy."""


def held_out(family: str, episodes: int, seed: int) -> list[Task]:
    """The tasks of an evaluation: the same for the same arguments."""
    start = seed * 1_000_003  # evaluations of different seeds do not overlap
    return [Task(family=family, seed=start + i, split="eval") for i in range(episodes)]


async def evaluate(
    tasks: Sequence[Task],
    play: Callable[[int, Task], Awaitable[Episode]],
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> Evaluation:
    """What `played` comes to. Raises NothingPlayed as it does."""
    return summarise(await played(tasks, play, concurrency, advance))


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
    kept = [e for e in episodes if e.outcome.status is not Status.ENVIRONMENT_FAILED]
    solved = np.array([e.outcome.valid and e.outcome.reward >= SOLVED for e in kept], np.float64)
    turns = [counted(e, "turns", len(e.turns)) for e in kept]
    ends = [max([t.start + t.seconds for t in e.turns], default=0.0) for e in kept]
    seconds = [counted(e, "seconds", end) for e, end in zip(kept, ends, strict=True)]
    tokens = [
        counted(e, "completion_tokens", sum(len(t.output) for t in e.turns)) for e in episodes
    ]
    return Evaluation(
        episodes=len(episodes),
        success=float(solved.mean()) if len(kept) else 0.0,
        success_ci=bootstrap(solved),
        mean_turns=float(np.mean(turns)) if turns else 0.0,
        tokens_sampled=int(sum(tokens)),
        seconds_mean=float(np.mean(seconds)) if seconds else 0.0,
        failures=len(episodes) - len(kept),
    )


def counted(episode: Episode, measure: str, recorded: float) -> float:
    """What our gateway recorded of an episode, or else what its agent measured itself."""
    return recorded if episode.turns else episode.outcome.metrics.get(measure, 0.0)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values` [n], by resampling; (0, 0) when empty."""
    if len(values) == 0:
        return 0.0, 0.0
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
