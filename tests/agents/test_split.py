"""Held-out content is never trained on, whatever the seeds."""

from typing import Any

import numpy as np
import pytest

from forge_jax.agents.split import HELD_OUT_SHARE, content_of, draw_from, held_out
from forge_jax.agents.tasks import calc, desk, gather, hop, notes, qa
from forge_jax.config import UserError
from forge_jax.types import Task

DRAWS = {"hop": hop.draw, "notes": notes.draw}


def contents(family: str, split: str, seeds: range) -> list[str]:
    return [content_of(Task(family=family, seed=s, split=split), DRAWS[family]) for s in seeds]


LEVELLED: dict[str, Any] = {"calc": calc, "desk": desk, "gather": gather, "qa": qa}


@pytest.mark.parametrize("family", ["hop", "notes"])
def test_training_and_held_out_content_never_meet(family: str) -> None:
    train, held = contents(family, "train", range(3000)), contents(family, "eval", range(300))
    assert not set(train) & set(held)
    rng = np.random.default_rng(0)
    played = {draw_from("train", DRAWS[family], rng) for _ in range(3000)}
    assert not played & set(held)


def test_the_content_of_a_task_follows_from_family_split_and_seed() -> None:
    assert contents("hop", "eval", range(50)) == contents("hop", "eval", range(50))
    assert contents("hop", "train", range(50)) != contents("hop", "eval", range(50))
    assert contents("hop", "train", range(50)) != contents("hop", "train", range(1, 51))


def test_where_the_space_is_large_held_out_tasks_are_not_near_repetitions() -> None:
    # Long chains share less than half of their steps with all of a run's training chains.
    steps = {c[i : i + 3] for c in contents("hop", "train", range(640)) for i in range(len(c) - 2)}
    held = [c for c in contents("hop", "eval", range(256)) if len(c) == 5]
    seen = np.mean([c[i : i + 3] in steps for c in held for i in range(3)])
    assert seen < 0.5


def test_where_the_space_is_small_training_covers_the_rest_of_it() -> None:
    # notes has 10,000 contents: what is held out are whole contents, not their parts.
    train = set(contents("notes", "train", range(2000)))
    assert len(set(contents("notes", "eval", range(400)))) > 300
    assert {c[:2] for c in train} == {f"{n:02d}" for n in range(100)}


def test_one_content_in_so_many_is_held_out() -> None:
    share = np.mean([held_out(f"{n:04d}") for n in range(10_000)])
    assert abs(share - 1 / HELD_OUT_SHARE) < 0.02


def test_an_unknown_split_or_seed_is_refused() -> None:
    with pytest.raises(UserError, match="split='test'"):
        content_of(Task(family="hop", seed=0, split="test"), hop.draw)
    with pytest.raises(UserError, match="seed=-1"):
        content_of(Task(family="hop", seed=-1), hop.draw)


@pytest.mark.parametrize("family", LEVELLED)
def test_every_level_is_split_and_no_other_is_there(family: str) -> None:
    module = LEVELLED[family]
    levels = len(module.LEVELS)
    worlds = {}
    for split in ("train", "eval"):
        for level in range(levels):
            tasks = [Task(family=family, seed=s, split=split, level=level) for s in range(8)]
            worlds[split, level] = {module.world_of(task) for task in tasks}
            assert worlds[split, level] == {module.world_of(task) for task in tasks}
    assert len(set().union(*worlds.values())) == sum(map(len, worlds.values()))
    for level in (-1, levels):
        with pytest.raises(UserError, match=f"level={level} of a task of {family}"):
            module.world_of(Task(family=family, seed=0, level=level))
