"""reasoning: questions by number, split by their words, scored by the library."""

import asyncio
import itertools

import numpy as np
import pytest

from forge_jax.agents.families import agent_of, check_level, family_of
from forge_jax.agents.faults import BadCall
from forge_jax.agents.sources import TaskSource
from forge_jax.agents.tasks import reasoning
from forge_jax.agents.tasks.reasoning import CHOSEN, GUARDED, Noise, Question, world_of
from forge_jax.config import UserError
from forge_jax.types import Task

ANY = "reasoning:syllogism+chain_sum"


def score(world: Question, answer: str) -> float:
    return world.score(answer)


def worlds(split: str, family: str, count: int, level: int = 0) -> list[Question]:
    tasks = [Task(family=family, seed=s, split=split, level=level) for s in range(count)]
    return [world_of(task) for task in tasks]


@pytest.mark.parametrize("family", ["reasoning", ANY])
def test_training_and_held_out_questions_never_meet_and_repeat(family: str) -> None:
    train = [world.entry["question"] for world in worlds("train", family, 60)]
    held = [world.entry["question"] for world in worlds("eval", family, 20)]
    rng = np.random.default_rng(0)
    played = [family_of(family).play(rng)[0].messages[0]["content"] for _ in range(40)]
    asked = {text.removeprefix(reasoning.ASK) for text in played}
    assert not (set(train) | asked) & set(held)
    assert train == [world.entry["question"] for world in worlds("train", family, 60)]


def test_only_what_the_scorer_calls_right_between_tags_pays() -> None:
    for world in worlds("train", "reasoning", 20):
        right = world.entry["answer"]
        assert score(world, f"I think it is\n<answer>{right}</answer>") == 1
        assert score(world, f"<answer>{right}</answer> no: <answer>12345</answer>") < 1
        for wrong in ("", right, "<answer></answer>", "<answer>unknown</answer>"):
            assert score(world, wrong) < 1
    with pytest.raises(BadCall):
        asyncio.run(world.call("search", {}))


def test_play_wins_as_often_as_it_is_meant_to() -> None:
    def won(noise: Noise) -> float:
        rng, found = np.random.default_rng(1), []
        for _ in range(200):
            world = reasoning.drawn("train", CHOSEN, 0, rng)
            (call,) = reasoning.script(world, rng, noise)
            found.append(score(world, call.reply["content"]) == 1)
        return float(np.mean(found))

    assert won(Noise(shy=0.0)) == 1
    assert 0.5 < won(reasoning.NOISE) < 0.7


def test_the_family_asks_the_generators_of_its_name_each_as_often() -> None:
    asked = [world.generator for world in worlds("train", ANY, 100)]
    assert set(asked) == {"syllogism", "chain_sum"}
    assert 35 < asked.count("syllogism") < 65
    assert {world.generator for world in worlds("train", "reasoning", 60)} == set(CHOSEN)
    source = TaskSource((ANY,), seed=0, split="train")
    assert {task.family for task in itertools.islice(source, 3)} == {ANY}


def test_levels_are_those_of_the_curriculum() -> None:
    def longest(level: int) -> int:
        made = worlds("train", "reasoning:chain_sum", 20, level)
        return max(len(world.entry["metadata"]["expression"]) for world in made)

    assert longest(0) <= longest(1) < longest(4)


@pytest.mark.parametrize("name", ["chess", "", "gcd+", *sorted(GUARDED)[:2]])
def test_generators_that_cannot_be_used_are_refused_by_name(name: str) -> None:
    family = f"reasoning:{name}"
    if name:
        with pytest.raises(UserError, match=r"task=reasoning:.*known: .*chain_sum"):
            agent_of(family)
    else:
        assert agent_of(family) == agent_of("reasoning")
    for ask in (
        lambda: world_of(Task(family="reasoning:gcd", seed=0, level=9)),
        lambda: check_level("reasoning:gcd", 9),
    ):
        with pytest.raises(UserError, match="level=9 of task=reasoning:gcd"):
            ask()
    check_level("reasoning", 5)
