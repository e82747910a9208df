"""What the calls of an episode are worth: process, speed and outcome, weighted and added.

Episodes of one group come in, the rewards of their calls come out, as pure functions of what the
pool holds. Calls are ordered by their start, ties by their number; speed and outcome are paid at
the last of them. Calls that nobody received the answer of are no calls here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_jax.config import CreditConfig, RewardConfig, Weights
from forge_jax.rl.advantages import to_go
from forge_jax.rl.evaluate import SOLVED
from forge_jax.rl.process import Decode, faults, process_reward
from forge_jax.rl.speed import speeds, times_of
from forge_jax.types import Episode, Finish, Turn

ALL = ""  # the agents of an episode that have no reward of their own, together


def no_text(ids: Sequence[int]) -> str:
    """Nothing: what tokens say where no text is looked at."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How episodes are rewarded and credited, and what their tokens say."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    decode: Decode = no_text


OUTCOME = Scorer()  # the outcome alone, against the mean of the siblings


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The calls of one episode that share a reward, in the order of their starts."""

    calls: np.ndarray  # i64[T], their numbers in the episode; T may be 0
    returns: np.ndarray  # f64[max(T, 1)], to go, of process and outcome
    last: np.ndarray  # f64[max(T, 1)], return to go of a reward of 1 at the last call


def agents_of(group: Sequence[Episode]) -> list[str]:
    """The labels under which calls of a group are credited: `ALL`, then agents of their own."""
    own = {label for episode in group for label in episode.outcome.agents}
    return [ALL, *sorted(own - {ALL})]


def counts(episode: Episode, label: str) -> bool:
    """True for a valid episode that has a reward for the agent of this label."""
    return episode.outcome.valid and (label == ALL or label in episode.outcome.agents)


def part(episode: Episode, label: str, scorer: Scorer) -> Part:
    """The calls of an episode that are credited under `label`, and what they are worth."""
    outcome, turns = episode.outcome, episode.turns
    shared = label == ALL
    mine = [
        number
        for number, turn in enumerate(turns)
        if turn.finish is not Finish.ABORT
        and (turn.agent not in outcome.agents if shared else turn.agent == label)
    ]
    calls = sorted(mine, key=lambda number: (turns[number].start, number))
    family = episode.task.family
    weights = scorer.reward.weights(family)
    rewards = np.zeros(max(1, len(calls)))
    if weights.process:
        for place, number in enumerate(calls):
            rewards[place] = weights.process * process(turns[number], family, scorer)
    rewards[-1] += weights.outcome * (outcome.reward if shared else outcome.agents[label])
    times = np.arange(len(rewards), dtype=np.float64)
    if scorer.credit.clock == "seconds" and calls:
        times = np.array([turns[number].start for number in calls])
    one = np.zeros(len(rewards))
    one[-1] = 1.0
    gamma = scorer.credit.gamma
    return Part(
        calls=np.array(calls, np.int64),
        returns=to_go(rewards, times, gamma),
        last=to_go(one, times, gamma),
    )


def process(turn: Turn, family: str, scorer: Scorer) -> float:
    """The process reward of a call at a task of a family, at most 0."""
    return process_reward(faults_of(turn, family, scorer), scorer.reward.faults)


def faults_of(turn: Turn, family: str, scorer: Scorer) -> dict[str, float]:
    """The size of every fault of a call at a task of a family: see `forge_jax.rl.process`."""
    return faults(turn, scorer.decode, scorer.reward.faults, scorer.reward.scripts(family))


def fault_sizes(episode: Episode, scorer: Scorer) -> list[dict[str, float]]:
    """The faults of every call of an episode."""
    received = [turn for turn in episode.turns if turn.finish is not Finish.ABORT]
    return [faults_of(turn, episode.task.family, scorer) for turn in received]


def fault_means(sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean size of every fault over the calls in which it was measured."""
    names = dict.fromkeys(name for one in sizes for name in one)
    return {name: float(np.mean([one[name] for one in sizes if name in one])) for name in names}


def measured_faults(episodes: Sequence[Episode], scorer: Scorer) -> list[dict[str, float]]:
    """The faults of every call of valid episodes, of families in which they are to be told."""
    told = [e for e in episodes if e.outcome.valid and scorer.reward.measures(e.task.family)]
    return [sizes for episode in told for sizes in fault_sizes(episode, scorer)]


def solved(episode: Episode) -> bool:
    """True for an episode that came to all that its task is worth."""
    return episode.outcome.valid and episode.outcome.reward >= SOLVED


def speed_rewards(group: Sequence[Episode], on: str) -> np.ndarray:
    """f64[n, n] of n valid siblings, see `forge_jax.rl.speed.speeds`; paid `on` solved or all."""
    seconds = np.array([times_of(episode.turns).completion for episode in group], np.float64)
    paid = [on == "all" or solved(episode) for episode in group]
    return speeds(seconds, np.array(paid, bool))


def seen_returns(group: Sequence[Episode], parts: Sequence[Part], weights: Weights) -> np.ndarray:
    """Returns of n valid siblings as each of them sees them, f64[n, n, T] with zeros after the
    last call; `weights` of their family."""
    n, most = len(parts), max((len(one.returns) for one in parts), default=1)
    returns, last = np.zeros((2, n, most))
    for place, one in enumerate(parts):
        returns[place, : len(one.returns)] = one.returns
        last[place, : len(one.last)] = one.last
    if not weights.speed:
        return np.broadcast_to(returns, (n, n, most))
    paid = speed_rewards(group, weights.speed_on)
    return returns + weights.speed * paid[:, :, None] * last
