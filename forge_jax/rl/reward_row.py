"""What the consumed episodes were rewarded for: every component's mean, one row a step.

Consumed items go in, plain JSON comes out. What a component weighs does not matter here: speed is
told where it weighs anything, faults also where anything is said of them.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.rl.collect import Taken
from forge_jax.rl.measure import mean
from forge_jax.rl.process import process_reward
from forge_jax.rl.rewards import Scorer, fault_means, measured_faults, solved, speed_rewards
from forge_jax.rl.speed import times_of
from forge_jax.types import Episode

logger = logging.getLogger(__name__)

WINDOW = 5  # steps on either side of what the alarm compares: policies have collapsed within ten
SURE = 3.0  # standard errors that both changes exceed


def reward_row(taken: Sequence[Taken], scorer: Scorer) -> dict[str, Any]:
    """Means over the valid episodes, unweighted; of calls, over the calls of these.

    ``speed_*_seconds`` are of those that solved their task: completion, and what it is without;
    `speed_all_seconds` is the completion of all.
    """
    groups = [[e for e in item.episodes if e.outcome.valid] for item in taken]
    valid = [episode for group in groups for episode in group]
    row: dict[str, Any] = {"solved": mean([float(solved(episode)) for episode in valid])}
    row["speed_all_seconds"] = mean([times_of(episode.turns).completion for episode in valid])
    times = [times_of(episode.turns) for episode in valid if solved(episode)]
    row["speed_completion_seconds"] = mean([one.completion for one in times])
    row["speed_inference_seconds"] = mean([one.inference for one in times])
    row["speed_between_seconds"] = mean([one.between for one in times])
    row["speed_queue_seconds"] = mean([one.queue for one in times])
    if any(scorer.reward.weights(episode.task.family).speed for episode in valid):
        paid = [np.diagonal(_speeds(group, scorer)) for group in groups if group]
        row["reward_speed"] = mean(np.concatenate(paid).tolist())
    return row | _process(valid, scorer)


def _speeds(group: Sequence[Episode], scorer: Scorer) -> np.ndarray:
    return speed_rewards(group, scorer.reward.weights(group[0].task.family).speed_on)


def _process(valid: Sequence[Episode], scorer: Scorer) -> dict[str, Any]:
    sizes = measured_faults(valid, scorer)
    if not sizes:
        return {}
    rewards = [process_reward(one, scorer.reward.faults) for one in sizes]
    means = fault_means(sizes)
    return {"reward_process": mean(rewards), **{f"fault_{n}": size for n, size in means.items()}}


def alarmed(rows: Sequence[Mapping[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """`row` with what the alarm says of it, after `rows`, where its speed is rewarded."""
    if "reward_speed" not in row:
        return row
    rings = speed_alarm([*rows[1 - 2 * WINDOW :], row])
    if rings:
        logger.warning("success fell while episodes took less time: lower reward.speed")
    return row | {"speed_alarm": rings}


def speed_alarm(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True where speed was bought with failures: over the last `WINDOW` steps against as many
    before, success fell and so did the time of successes or of all episodes, both by `SURE`
    standard errors.

    It looks at the time itself: a reward relative to siblings is about 1/2 whatever they take.
    """
    times = ("speed_completion_seconds", "speed_all_seconds")
    return _fell(rows, "solved") and any(_fell(rows, name) for name in times)


def _fell(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows[-2 * WINDOW :]]
    before = np.array([x for x in values[:-WINDOW] if x is not None], np.float64)
    after = np.array([x for x in values[-WINDOW:] if x is not None], np.float64)
    if len(rows) < 2 * WINDOW or min(len(before), len(after)) < 2:
        return False
    error = np.hypot(before.std(ddof=1) / len(before) ** 0.5, after.std(ddof=1) / len(after) ** 0.5)
    return bool(before.mean() - after.mean() > SURE * error)
