"""A source of tasks is endless, shuffled by its seed, and continues exactly."""

import itertools
import json

import pytest

from forge_jax.agents.families import FAMILIES, agent_of, family_of
from forge_jax.agents.sources import SEEDS, TaskSource
from forge_jax.config import UserError
from forge_jax.types import Task


def take(source: TaskSource, count: int) -> list[Task]:
    return list(itertools.islice(source, count))


@pytest.mark.parametrize("consumed", [0, 1, 17, SEEDS - 2])
def test_a_restored_source_goes_on_as_if_never_stopped(consumed: int) -> None:
    source = TaskSource(("hop", "notes"), seed=3, split="train")
    source.restore({**source.state(), "next": consumed})
    state = json.loads(json.dumps(source.state()))
    expected = take(source, 20)
    resumed = TaskSource(("hop", "notes"), seed=3, split="train")
    resumed.restore(state)
    assert take(resumed, 20) == expected
    assert resumed.state() == source.state()


def test_order_follows_from_the_seed() -> None:
    def seeds(seed: int) -> list[int]:
        return [task.seed for task in take(TaskSource(("hop",), seed=seed, split="train"), 50)]

    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)
    assert seeds(0) != sorted(seeds(0))
    assert len(set(seeds(0))) == 50


def test_families_take_turns() -> None:
    tasks = take(TaskSource(("hop", "notes"), seed=0, split="eval"), 40)
    assert [task.family for task in tasks].count("hop") == 20
    assert {task.split for task in tasks} == {"eval"}
    alone = take(TaskSource(("hop",), seed=0, split="eval"), 20)
    assert [task for task in tasks if task.family == "hop"] == alone


def test_tasks_come_again_in_another_order() -> None:
    source = TaskSource(("hop",), seed=0, split="train")
    first = take(source, 20)
    source.restore({**source.state(), "next": SEEDS})
    again = take(source, 20)
    assert again != first
    assert all(0 <= task.seed < SEEDS for task in again)


def test_a_state_of_another_source_is_refused() -> None:
    state = TaskSource(("hop",), seed=0, split="train").state()
    for other in (
        TaskSource(("notes",), seed=0, split="train"),
        TaskSource(("hop",), seed=1, split="train"),
        TaskSource(("hop",), seed=0, split="eval"),
    ):
        with pytest.raises(UserError, match="cannot continue"):
            other.restore(state)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="families="):
        TaskSource((), seed=0, split="train")
    with pytest.raises(UserError, match="split='test'"):
        TaskSource(("hop",), seed=0, split="test")
    for ask in (family_of, agent_of, lambda name: TaskSource((name,), seed=0, split="train")):
        with pytest.raises(UserError, match=rf"task='chess'.*: {', '.join(FAMILIES)}"):
            ask("chess")
