"""pass@k is unbiased, intervals are over tasks, and nothing that failed is lost."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from small_policy import make_turn

from forge_jax.crediting import FaultConfig, RewardConfig
from forge_jax.rl.evaluate import bootstrap, summarise
from forge_jax.rl.measure import parallel_share
from forge_jax.rl.rewards import Scorer
from forge_jax.rl.scores import pass_at, scores
from forge_jax.types import Episode, Outcome, Status, Task


def episode(task: int, replica: int, passed: bool, tokens: int = 3) -> Episode:
    return Episode(
        item=task,
        replica=replica,
        task=Task(family="hop", seed=task, split="eval"),
        outcome=Outcome(status=Status.COMPLETED, reward=float(passed)),
        turns=(make_turn([1, 2], [1] * tokens, [0] * tokens),) * 2,
    )


def failed(task: int, status: Status, error: str) -> Episode:
    named = Task(family="hop", seed=task, split="eval")
    outcome = Outcome(status=status, error=error)
    return Episode(item=task, replica=0, task=named, outcome=outcome, turns=())


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        played = [True] * passed + [False] * (n - passed)
        choices = list(itertools.combinations(played, k))
        assert pass_at(k, passed, n) == pytest.approx(np.mean([any(c) for c in choices]))


def test_pass_at_k_is_unbiased_where_one_minus_a_power_is_not() -> None:
    chance, n, k = 0.2, 6, 3
    law = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    true = 1 - (1 - chance) ** k
    assert sum(p * pass_at(k, c, n) for c, p in enumerate(law)) == pytest.approx(true)
    plugged = sum(p * (1 - (1 - c / n) ** k) for c, p in enumerate(law))
    assert abs(plugged - true) > 0.01


def test_samples_of_one_task_count_as_one_task_in_intervals() -> None:
    """Tasks solved always or never: eight samples of each say no more than one."""
    one = [episode(t, 0, t % 2 == 0) for t in range(20)]
    eight = [episode(t, i, t % 2 == 0) for t in range(20) for i in range(8)]
    assert summarise(eight).success_ci == summarise(one).success_ci
    spread = np.ptp(bootstrap(np.array([float(t % 2) for t in range(160)])))
    assert np.ptp(summarise(eight).success_ci) > 2 * spread
    row = scores(eight, 8)
    assert row["pass_at"] == {"1": 0.5, "2": 0.5, "4": 0.5, "8": 0.5}
    assert row["pass_at_ci"]["8"] == summarise(one).success_ci


def test_pass_at_k_grows_with_k_and_begins_at_success() -> None:
    rng = np.random.default_rng(0)
    episodes = [episode(t, i, rng.random() < 0.3) for t in range(30) for i in range(6)]
    row = scores(episodes, 6)
    assert list(row["pass_at"]) == ["1", "2", "4", "6"]
    assert row["pass_at"]["1"] == pytest.approx(summarise(episodes).success)
    assert np.all(np.diff(list(row["pass_at"].values())) > 0)


def test_costs_are_means_over_episodes_with_intervals_around_them() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size=24)
    row = scores([episode(i, 0, True, int(n)) for i, n in enumerate(lengths)], 1)
    assert row["tokens_sampled_mean"] == pytest.approx(2 * lengths.mean())
    assert (row["tokens_prompt_mean"], row["mean_turns"]) == (4, 2)
    low, high = row["tokens_sampled_mean_ci"]
    assert low < row["tokens_sampled_mean"] < high


def test_faults_are_means_over_the_calls_of_all_tasks() -> None:
    def played(task: int, *bad: bool) -> Episode:
        good = make_turn([1, 2], [97, 98, 99], [0] * 3)
        turns = tuple(dataclasses.replace(good, refused=int(one)) for one in bad)
        return dataclasses.replace(episode(task, 0, True), turns=turns)

    episodes = [played(0, True), played(1, False, False, False), played(2, True, False)]
    latin = RewardConfig(faults=FaultConfig(scripts=("LATIN",)))
    row = scores(
        episodes, 1, Scorer(reward=latin, decode=lambda ids: "中" + "".join(map(chr, ids)))
    )
    assert row["faults"]["calls"] == 2 / 6
    assert row["faults"]["language"] == pytest.approx(1 / 4)
    low, high = row["faults_ci"]["calls"]
    assert low == 0 < 2 / 6 < high == 1, "tasks are drawn, each with all of its calls"
    assert "language" not in scores(episodes, 1)["faults"]


def test_what_failed_is_told_by_its_reason() -> None:
    broken = failed(7, Status.ENVIRONMENT_FAILED, "no disk")
    late = [failed(t, Status.TIMED_OUT, "no end after 5 s") for t in (8, 9)]
    row = scores([episode(0, 0, True), episode(1, 0, False), broken, *late], 1)
    assert row["ended"] == {"completed": 2, "environment_failed": 1, "timed_out": 2}
    assert row["errors"] == {"no end after 5 s": 2, "no disk": 1}
    assert row["pass_at"] == {"1": 0.25}, "what the environment broke counts for nothing"
    assert row["tasks"] == 5


def test_a_task_with_too_few_episodes_left_is_no_word_on_pass_at_k() -> None:
    broken = failed(1, Status.ENVIRONMENT_FAILED, "no disk")
    row = scores([episode(0, 0, True), episode(0, 1, False), episode(1, 0, False), broken], 2)
    assert row["pass_at"] == {"1": 0.25, "2": 1.0}
    assert scores([broken], 2)["pass_at"] == {}


def test_parallel_calls_are_a_share_of_the_replies_that_call() -> None:
    def told(task: int, calling: int, several: int) -> Episode:
        counts = {"calling_replies": float(calling), "parallel_replies": float(several)}
        outcome = Outcome(status=Status.COMPLETED, reward=1.0, metrics=counts)
        named = Task(family="hop", seed=task)
        return Episode(item=task, replica=0, task=named, outcome=outcome, turns=())

    episodes = [told(0, 4, 1), told(1, 1, 1), told(2, 0, 0), episode(3, 0, True)]
    row = scores(episodes, 1)
    assert row["calls_parallel"] == parallel_share(episodes) == 2 / 5
    assert row["calls_parallel_ci"][0] < 2 / 5 < row["calls_parallel_ci"][1]
    assert "calls_parallel" not in scores([episode(3, 0, True)], 1)
    assert parallel_share([episode(3, 0, True)]) is None


def test_what_a_server_elsewhere_does_not_tell_is_left_out() -> None:
    told = {"turns": 3.0, "prompt_tokens": 20.0, "completion_tokens": 5.0, "seconds": 0.5}
    outcome = Outcome(status=Status.COMPLETED, reward=1.0, metrics=told)
    task = Task(family="hop", seed=0, split="eval")
    row = scores([Episode(item=0, replica=0, task=task, outcome=outcome, turns=())], 1)
    assert (row["mean_turns"], row["tokens_prompt_mean"], row["seconds_mean"]) == (3, 20, 0.5)
    assert "seconds_completion_mean" not in row
    assert row["faults"] == {}
