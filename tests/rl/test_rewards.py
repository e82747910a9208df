"""Laws of rewards: faults of calls, time beside siblings, and what a baseline may know."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from forge_jax.crediting import CreditConfig, FamilyReward, FaultConfig, RewardConfig
from forge_jax.loading import UserError, load
from forge_jax.rl.collect import Taken
from forge_jax.rl.credit import credited
from forge_jax.rl.process import longest_certain, mixing, repetition
from forge_jax.rl.reward_row import WINDOW, reward_row, speed_alarm
from forge_jax.rl.rewards import Scorer, speed_rewards
from forge_jax.rl.speed import speeds, times_of, union
from forge_jax.types import Episode, Finish, Outcome, Status, Task, Turn


def turn(start: float = 0.0, seconds: float = 1.0, **fields: Any) -> Turn:
    output = np.array(fields.pop("output", [1, 2]), np.int32)
    return Turn(**{
        "prompt": np.zeros(1, np.int32), "output": output,
        "logprobs": np.full(len(output), -1.0, np.float32), "versions": 0 * output,
        "temperature": 1.0, "finish": Finish.STOP, "parent": None, "start": start,
        "seconds": seconds, "queue_seconds": 0.0,
    } | fields)  # fmt: skip


def episode(reward: float, *turns: Turn, family: str = "hop", **outcome: Any) -> Episode:
    told = Outcome(**{"status": Status.COMPLETED, "reward": reward} | outcome)
    task = Task(family=family, seed=0)
    return Episode(item=0, replica=0, task=task, outcome=told, turns=turns)


def scorer(credit: CreditConfig | None = None, **reward: Any) -> Scorer:
    def decode(ids: Any) -> str:
        return "".join(map(chr, ids))

    return Scorer(reward=RewardConfig(**reward), credit=credit or CreditConfig(), decode=decode)


def values(group: list[Episode], *how: Scorer) -> list[list[float]]:
    return [one.tolist() for one in credited([group], *how)[0]]


def test_the_outcome_alone_is_the_default_and_the_same_for_every_call() -> None:
    group = [episode(1.0, turn(), turn(1.0)), episode(0.0, turn()), episode(0.5)]
    assert values(group) == [[0.75, 0.75], [-0.75], []]
    assert values(group, scorer()) == values(group)


def test_a_fault_costs_the_calls_up_to_it() -> None:
    bad = turn(1.0, malformed=1)
    group = [episode(1.0, turn(0.0), bad, turn(2.0)), episode(1.0, turn())]
    got = values(group, scorer(process=0.5))
    assert got == [[-0.5, -0.5, 0.0], [0.5]]
    seconds = CreditConfig(gamma=0.5, clock="seconds")
    assert values(group, scorer(seconds, process=0.5))[0][0] == 0.25 - 0.25 - 1.0


def test_calls_are_ordered_by_their_start() -> None:
    late = episode(1.0, turn(5.0, malformed=1), turn(0.0))
    got = values([late, episode(1.0, turn())], scorer(process=1.0))
    assert got == [[-1.0, -1.0], [1.0]]


def test_what_a_call_does_wrong_is_measured_on_its_tokens() -> None:
    assert repetition(np.array([1, 2, 1, 2, 1, 2]), 2) == 1 - 2 / 5
    assert repetition(np.arange(9), 2) == repetition(np.arange(1), 2) == 0.0
    near = np.log(np.float32([0.999, 0.5, 0.999, 0.999, 0.98]))
    assert longest_certain(near, 0.99) == 2
    assert longest_certain(near[:0], 0.99) == 0
    assert mixing("ab 12, 中文", ("LATIN",)) == 0.5
    assert mixing("Ünïcode", ("LATIN",)) == mixing("123", ("LATIN",)) == 0.0


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("calls", turn(refused=1)),
        ("unfinished", turn(finish=Finish.LENGTH)),
        ("repetition", turn(output=[7] * 40)),
        ("certain", turn(logprobs=np.float32([-1e-4, -1e-4]))),
        ("language", turn(output=[0x4E2D, 0x6587])),
    ],
)
def test_each_fault_costs_what_it_is_set_to_and_is_told_apart(name: str, fault: Turn) -> None:
    costs = dict.fromkeys(("calls", "unfinished", "repetition", "certain", "language"), 0.0)
    cfg = FaultConfig(**costs | {name: 0.5}, certain_tokens=2, scripts=("LATIN",))
    group = [episode(1.0, fault), episode(1.0, turn(output=[97, 98]))]
    how = scorer(process=1.0, faults=cfg)
    [bad], [good] = values(group, how)
    assert good == -bad
    assert good == pytest.approx(0.5, rel=0.05)
    row = reward_row([Taken(number=0, lag=0, updates=0, episodes=tuple(group))], how)
    told = {n: row[f"fault_{n}"] for n in costs}
    assert [n for n, size in told.items() if size] == [name]
    assert row["reward_process"] == pytest.approx(bad / 2)


def test_faults_are_told_where_anything_is_said_of_them_and_paid_where_they_weigh() -> None:
    group = [episode(1.0, turn(output=[0x4E2D], refused=1), turn(1.0)), episode(0.0, turn())]
    taken = [Taken(number=0, lag=0, updates=0, episodes=tuple(group))]
    said = FaultConfig(scripts=("LATIN",), calls=0.5)
    told = reward_row(taken, scorer(faults=said))
    assert (told["fault_calls"], told["fault_language"]) == (1 / 3, 1 / 3)
    assert told["reward_process"] == pytest.approx(-(0.5 + 1.0) / 3)
    assert values(group, scorer(faults=said)) == values(group)
    paid = reward_row(taken, scorer(faults=said, process=0.5))
    assert paid == told
    assert values(group, scorer(faults=said, process=0.5)) != values(group)
    silent = reward_row(taken, scorer())
    assert not [name for name in silent if name.startswith(("fault_", "reward_"))]
    assert "fault_language" not in reward_row(taken, scorer(process=0.5))
    latin = FamilyReward(family="hop", scripts=("LATIN",))
    assert reward_row(taken, scorer(families=(latin,)))["fault_language"] == 1 / 3


def test_waiting_is_free_and_what_runs_at_once_counts_once() -> None:
    waited = times_of([turn(0.0, 3.0, queue_seconds=2.0), turn(4.0, 1.0)])
    assert (waited.queue, waited.inference, waited.between) == (2.0, 2.0, 1.0)
    assert waited.completion == 3.0
    both = times_of([turn(0.0, 2.0), turn(1.0, 2.0)])
    assert (both.inference, both.between) == (3.0, 0.0)
    lost = times_of([turn(0.0, 2.0, finish=Finish.ABORT), turn(2.0, 1.0)])
    assert (lost.queue, lost.completion) == (2.0, 1.0)
    assert union([(0.0, 1.0), (3.0, 4.0), (0.5, 2.0), (0.6, 0.7)]) == 3.0


def test_speed_is_paid_on_success_alone_and_bounded() -> None:
    seconds, solved = np.array([1.0, 3.0, 100.0, 0.1]), np.array([True, True, True, False])
    paid = speeds(seconds, solved)
    assert (paid[:, 3] == 0).all()
    assert ((paid >= 0) & (paid <= 1)).all()
    assert np.diagonal(paid)[0] > np.diagonal(paid)[1] > np.diagonal(paid)[2] == 0.0
    np.testing.assert_array_equal(speeds(seconds[:1], solved[:1]), [[0.5]])


def test_without_the_gate_a_fast_failure_is_paid_and_all_are_what_others_compare_with() -> None:
    times = (1.0, 3.0, 0.0)
    group = [episode(float(t > 0), turn(0.0, t)) for t in times]
    [gated], [open_] = (
        [np.diagonal(speed_rewards(group, on)).tolist()] for on in ("solved", "all")
    )
    assert gated == [1 - 1 / 6, 0.0, 0.0]
    assert open_ == [1 - 1 / 3, 0.0, 1.0]
    row = {on: reward_row([Taken(number=0, lag=0, updates=0, episodes=tuple(group))],
                          scorer(speed=9.0, speed_on=on)) for on in ("solved", "all")}  # fmt: skip
    assert [row[on]["reward_speed"] for on in row] == [np.mean(gated), np.mean(open_)]
    assert row["all"]["speed_all_seconds"] == np.mean(times)
    assert row["all"]["speed_completion_seconds"] == 2.0
    # What the gate is for: with it the failure is worst, without it best.
    ranks = [np.argsort([v[0] for v in values(group, scorer(speed=9.0, speed_on=on))]).tolist()
             for on in ("solved", "all")]  # fmt: skip
    assert (ranks[0][0], ranks[1][-1]) == (2, 2)


@pytest.mark.parametrize("on", ["solved", "all"])
def test_what_siblings_get_does_not_depend_on_the_episode_they_are_the_baseline_of(on: str) -> None:
    rng = np.random.default_rng(0)
    times, how = rng.random(5) + 1, scorer(speed=1.0, speed_on=on)
    group = [episode(1.0, turn(0.0, float(t))) for t in times]
    slower = [dataclasses.replace(group[0], turns=(turn(0.0, 2.9),)), *group[1:]]
    failed = [dataclasses.replace(group[0], outcome=Outcome(status=Status.COMPLETED)), *group[1:]]
    own = [speeds(times, np.ones(5, bool))[0, 0], speeds(np.array([2.9, *times[1:]]),
           np.ones(5, bool))[0, 0]]  # fmt: skip
    [before], [after], [none] = (values(g, how)[0] for g in (group, slower, failed))
    np.testing.assert_allclose(before - after, own[0] - own[1])
    # Its success moves its own reward, by 1 and a speed that is paid on it, and no baseline of its
    # own.
    np.testing.assert_allclose(before - none, 1.0 + own[0] * (on == "solved"))


def test_agents_with_a_reward_of_their_own_are_credited_from_that() -> None:
    def run(reward: float, worker: float | None) -> Episode:
        calls = (turn(0.0, agent="planner"), turn(1.0, agent="worker"), turn(2.0, agent="planner"))
        return episode(reward, *calls, agents={} if worker is None else {"worker": worker})

    assert values([run(1.0, None), run(0.0, None)])[0] == [1.0] * 3
    assert values([run(1.0, 0.0), run(0.0, 3.0)]) == [[1.0, -3.0, 1.0], [-1.0, 3.0, -1.0]]
    got = values([run(1.0, 2.0), run(0.0, 2.0)])  # workers alike: theirs says nothing
    np.testing.assert_array_equal(got[0], [1.0, np.nan, 1.0])


@pytest.mark.parametrize("cuts", [1, 3])
def test_an_episode_has_the_same_advantage_however_it_is_cut_into_calls(cuts: int) -> None:
    calls = [turn(float(k), output=range(12 // cuts)) for k in range(cuts)]
    for how in (scorer(), scorer(CreditConfig(scale="batch")), scorer(CreditConfig(scale="group"))):
        got = values([episode(1.0, *calls), episode(0.0, turn(output=range(4)))], how)
        assert got[0] == [values([episode(1.0, turn()), episode(0.0, turn())], how)[0][0]] * cuts


def test_scales_are_of_episodes_of_the_group_the_family_or_the_batch() -> None:
    def pair(size: float, family: str) -> list[Episode]:
        return [
            episode(size, turn(), turn(1.0), family=family),
            episode(0.0, turn(), family=family),
        ]

    groups = [pair(1.0, "hop"), pair(3.0, "hop"), pair(100.0, "notes")]

    def first(scale: str) -> list[float]:
        return [g[0][0] for g in credited(groups, scorer(CreditConfig(scale=scale)))]

    assert first("none") == [1.0, 3.0, 100.0]
    np.testing.assert_allclose(first("group"), [2**-0.5] * 3)
    one, three, notes = first("family")
    np.testing.assert_allclose([three / one, notes], [3.0, 2**-0.5])
    np.testing.assert_allclose(np.divide(first("batch"), first("batch")[0]), [1.0, 3.0, 100.0])


def test_families_have_weights_of_their_own() -> None:
    cfg = RewardConfig(process=1.0, families=(FamilyReward(family="notes", process=0.0),))
    how = Scorer(reward=cfg)
    pair = [(episode(1.0, turn(malformed=1), family=f), episode(1.0, turn(), family=f))
            for f in ("hop", "notes")]  # fmt: skip
    hop, notes = credited(pair, how)
    assert hop[0].tolist() == [-1.0]
    assert np.isnan(notes[0]).all()  # without the fault they are equal


def test_success_that_falls_with_the_time_of_successes_sets_the_alarm_off() -> None:
    rng = np.random.default_rng(0)

    def rows(solved: float, seconds: float, all_seconds: float = 3.0) -> list[dict[str, float]]:
        means = {"solved": solved, "speed_completion_seconds": seconds,
                 "speed_all_seconds": all_seconds}  # fmt: skip
        return [{n: mean + 0.01 * rng.normal() for n, mean in means.items()} for _ in range(WINDOW)]

    assert speed_alarm([*rows(0.9, 2.0), *rows(0.7, 1.0)])
    assert not speed_alarm([*rows(0.9, 2.0), *rows(0.9, 1.0)])
    assert not speed_alarm([*rows(0.9, 1.0), *rows(0.7, 1.0)])
    assert not speed_alarm(rows(0.7, 1.0))
    # A policy that is gone after ten updates is not told of after forty.
    solved = (0.52, 0.53, 0.47, 0.52, 0.27, 0.23, 0.16, 0.09, 0.0, 0.02)
    seconds = (0.34, 0.35, 0.30, 0.28, 0.18, 0.12, 0.12, 0.10, 0.04, 0.04)
    gone = zip(solved, seconds, strict=True)
    none: dict[str, Any] = {"speed_completion_seconds": None}
    assert speed_alarm([{"solved": s, "speed_all_seconds": x} | none for s, x in gone])
    # Failures that take no time, while those that succeed take as long as ever.
    assert speed_alarm([*rows(0.9, 2.0, 2.0), *rows(0.7, 2.0, 1.0)])


# No fault costs anything but one that needs `scripts`.
FREE = dict.fromkeys(("calls", "unfinished", "repetition", "certain"), 0.0)


@pytest.mark.parametrize(
    ("cls", "mapping", "said"),
    [
        (CreditConfig, {"gamma": 1.5}, "gamma=1.5"),
        (CreditConfig, {"clock": "seconds"}, "clock='seconds'"),
        (CreditConfig, {"baseline": "mean"}, "baseline='mean'"),
        (CreditConfig, {"baseline": "turn", "to_go": False}, "baseline='turn'"),
        (RewardConfig, {"outcome": 0.0}, "all 0"),
        (RewardConfig, {"speed": -1.0}, "speed=-1.0"),
        (RewardConfig, {"speed": 1.0, "speed_on": "valid"}, "speed_on='valid'"),
        (RewardConfig, {"speed_on": "all"}, "speed_on='all' goes with"),
        (
            RewardConfig,
            {"speed": 1.0, "families": [{"family": "hop", "speed": 0, "speed_on": "all"}]},
            "speed_on='all' of hop",
        ),
        (RewardConfig, {"process": -1.0}, "process=-1.0"),
        (RewardConfig, {"process": 1.0, "faults": {"scripts": ["latin"]}}, "latin"),
        (RewardConfig, {"process": 1.0, "faults": {"scripts": ["LATI"]}}, "'LATI' begins the Uni"),
        (RewardConfig, {"families": 2 * [{"family": "hop", "speed": 1.0}]}, "hop more than once"),
        (RewardConfig, {"families": [{"family": "hop"}]}, "'hop' has nothing of its own"),
        (RewardConfig, {"families": [{"family": "hop", "scripts": ["LATI"]}]}, "'LATI' begins"),
        (RewardConfig, {"process": 1.0, "faults": FREE}, "process=1.0: all faults cost 0"),
        (
            RewardConfig,
            {"faults": FREE, "families": [{"family": "hop", "process": 2.0}]},
            "process=2.0 of hop: all faults cost 0",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(cls: type, mapping: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(cls, mapping)
