"""What a domain plays next follows from what was solved, and from nothing else."""

import json

import pytest

from forge_jax.agents.curriculum import DomainTasks, Levels
from forge_jax.config import CurriculumConfig, UserError

ADAPTIVE = CurriculumConfig(levels=(0, 1, 2), promote=0.8, demote=0.2, memory=4)


def test_levels_without_a_threshold_come_in_turn() -> None:
    one = DomainTasks("calc", 0, curriculum=CurriculumConfig(levels=(2, 0)))
    assert [next(one).level for _ in range(6)] == [2, 0, 2, 0, 2, 0]


def test_success_promotes_failure_demotes_and_a_move_measures_anew() -> None:
    one = Levels(ADAPTIVE)

    def told(passed: float, times: int) -> int:
        for _ in range(times):
            one.learn(one.next(0), passed)
        return one.next(0)

    assert told(1.0, 3) == 0, "not yet measured"
    assert told(1.0, 1) == 1
    assert told(0.5, 20) == 1
    assert told(1.0, 2) == 1, "the mean of the last four is 0.75"
    assert told(1.0, 1) == 2, "... 0.875"
    assert told(1.0, 20) == 2, "there is no harder one"
    assert told(0.0, 4) == 1
    assert told(0.0, 4) == 0
    assert told(0.0, 20) == 0


def test_what_was_played_at_another_level_says_nothing_of_this_one() -> None:
    one = Levels(ADAPTIVE)
    for _ in range(4):
        one.learn(0, 1.0)
    for _ in range(8):
        one.learn(0, 1.0)  # admitted before the move, consumed after it
    assert one.next(0) == 1


def test_a_restored_domain_goes_on_as_if_never_stopped() -> None:
    def fresh() -> DomainTasks:
        return DomainTasks("calc", 3, tasks=7, curriculum=ADAPTIVE, solved=0.5)

    def step(one: DomainTasks) -> tuple[int, int]:
        task = next(one)
        one.learn(task, task.seed % 3, 2)
        return task.seed, task.level

    calm, broken = fresh(), fresh()
    expected = [step(calm) for _ in range(40)]
    found = []
    for _ in range(40):
        state = json.loads(json.dumps(broken.state()))
        broken = fresh()
        broken.restore(state)
        found.append(step(broken))
    assert found == expected
    assert calm.skipped == broken.skipped > 0
    with pytest.raises(UserError, match="cannot continue"):
        DomainTasks("calc", 3, tasks=7, curriculum=CurriculumConfig(levels=(1,))).restore(state)


def test_a_solved_task_does_not_come_again() -> None:
    one = DomainTasks("hop", 0, tasks=5, solved=1.0)
    for _ in range(5):
        task = next(one)
        one.learn(task, 4 if task.seed < 3 else 3, 4)
    assert {next(one).seed for _ in range(20)} == {3, 4}


def test_where_all_tasks_are_solved_there_is_still_a_next() -> None:
    one = DomainTasks("hop", 0, tasks=5, solved=0.5)
    for _ in range(5):
        one.learn(next(one), 3, 4)
    assert {next(one).seed for _ in range(20)} <= set(range(5))


def test_a_level_that_a_family_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"level=3 of task='calc' must be from 0 to 2"):
        DomainTasks("calc", 0, curriculum=CurriculumConfig(levels=(0, 3)))
    with pytest.raises(UserError, match="level=1 of task='hop'"):
        DomainTasks("hop", 0, curriculum=CurriculumConfig(levels=(1,)))
    DomainTasks("reasoning", 0, curriculum=CurriculumConfig(levels=(0, 5)))
    with pytest.raises(UserError, match=r"level=6 of task=reasoning:gcd: .* 0 to 5"):
        DomainTasks("reasoning:gcd", 0, curriculum=CurriculumConfig(levels=(0, 6)))
