"""Laws of the samples of a group: per episode, and no signal means no samples."""

import dataclasses

import numpy as np
import pytest

from forge_jax.config import CreditConfig
from forge_jax.rl.credit import credited, group_samples
from forge_jax.rl.rewards import Scorer
from forge_jax.types import Episode, Finish, Outcome, Status, Task, Turn


def turn(prompt: int = 3, output: int = 2, finish: Finish = Finish.STOP, temperature=1.0) -> Turn:
    return Turn(
        prompt=np.arange(prompt, dtype=np.int32),
        output=np.arange(output, dtype=np.int32),
        logprobs=np.linspace(-1, -2, output, dtype=np.float32),
        versions=np.zeros(output, np.int32),
        temperature=temperature,
        finish=finish,
        parent=None,
        start=0.0,
        seconds=0.1,
        queue_seconds=0.0,
    )


def episode(reward: float, turns: int = 1, status: Status = Status.COMPLETED) -> Episode:
    return Episode(
        item=0,
        replica=0,
        task=Task(family="hop", seed=0),
        outcome=Outcome(status=status, reward=reward),
        turns=tuple(turn() for _ in range(turns)),
    )


def test_an_episode_split_into_more_calls_has_the_same_advantage() -> None:
    short = group_samples([episode(1.0, turns=1), episode(0.0)])
    long = group_samples([episode(1.0, turns=5), episode(0.0)])
    assert {float(s.advantage.max()) for s, _ in short[:1]} == {
        float(s.advantage.max()) for s, _ in long[:5]
    }


@pytest.mark.parametrize(
    "group",
    [
        [episode(1.0), episode(1.0), episode(1.0 + 1e-7)],
        [episode(1.0), episode(0.0, status=Status.ENVIRONMENT_FAILED)],
        [episode(0.0, status=Status.TIMED_OUT)] * 4,
    ],
    ids=["equal rewards", "one valid episode", "none valid"],
)
def test_a_group_without_signal_trains_nothing(group: list[Episode]) -> None:
    assert group_samples(group) == []


def test_failed_environments_leave_loss_and_baseline() -> None:
    kept = [episode(1.0), episode(0.0), episode(0.0)]
    crashed = episode(0.0, status=Status.ENVIRONMENT_FAILED)
    alone, among = group_samples(kept), group_samples([*kept, crashed, crashed])
    assert len(among) == len(alone) == 3
    for (a, _), (b, _) in zip(alone, among, strict=True):
        np.testing.assert_array_equal(a.advantage, b.advantage)


def test_only_sampled_tokens_with_log_probs_are_trained() -> None:
    aborted = turn(finish=Finish.ABORT)
    greedy = turn(temperature=0.0)
    good = turn(prompt=4, output=3)
    first = Episode(
        item=0,
        replica=0,
        task=Task(family="hop", seed=0),
        outcome=Outcome(status=Status.COMPLETED, reward=1.0),
        turns=(aborted, greedy, good),
    )
    ((sample, source),) = group_samples([first, episode(0.0, turns=0)])
    assert source is good
    assert sample.mask.tolist() == [False] * 4 + [True] * 3
    np.testing.assert_array_equal(sample.old_logp[sample.mask], good.logprobs)
    assert (sample.advantage[sample.mask] == 1.0).all()
    assert not sample.advantage[~sample.mask].any()


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_what_is_trained_does_not_depend_on_how_an_episode_is_cut_into_calls(scale: str) -> None:
    """Every sampled token once, where it was sampled, with one advantage; copies are context."""
    text = np.arange(10, 22, dtype=np.int32)
    logprobs = np.linspace(-1, -2, 12, dtype=np.float32)

    def calls(borders: list[int]) -> tuple[Turn, ...]:
        ends = [*borders[1:], 12]
        return tuple(
            dataclasses.replace(
                turn(), prompt=text[:a], output=text[a:b], logprobs=logprobs[a:b],
                versions=np.zeros(b - a, np.int32), start=float(a),
            )
            for a, b in zip(borders, ends, strict=True)
        )  # fmt: skip

    def trained(borders: list[int]) -> list[tuple[list[int], float, float]]:
        group = [dataclasses.replace(episode(1.0), turns=calls(borders)), episode(0.0)]
        [credit] = credited([group], Scorer(credit=CreditConfig(scale=scale)))
        return [
            (sample.tokens[: place + 1].tolist(), sample.old_logp[place], sample.advantage[place])
            for sample, source in group_samples(group, credit)
            if source.output[0] >= 10
            for place in np.flatnonzero(sample.mask)
        ]

    whole = trained([3])
    assert len(whole) == 9
    for borders in ([3, 5], [3, 4, 5, 9], list(range(3, 12))):
        assert trained(borders) == whole
