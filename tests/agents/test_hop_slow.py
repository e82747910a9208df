"""hop_slow: worlds that wait as their seed says, and are otherwise what they seem."""

import asyncio
from typing import Any
from unittest import mock

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.tasks import hop, hop_slow
from forge_jax.types import Task


def task(seed: int, split: str = "train", level: int = 0) -> Task:
    return Task(family="hop_slow", seed=seed, split=split, level=level)


def waited(world: Any, name: str, key: Any) -> tuple[str | None, list[float]]:
    """What a lookup gives, None for a bad one, and the seconds it waits for."""
    seconds: list[float] = []

    async def sleep(time: float) -> None:
        seconds.append(time)

    with mock.patch.object(hop_slow.asyncio, "sleep", sleep):
        try:
            return asyncio.run(world.call(name, {"key": key})), seconds
        except BadCall:
            return None, seconds


def test_a_lookup_waits_as_long_as_its_task_says_and_held_out_ones_do_not() -> None:
    for seed in range(20):
        world = hop_slow.world_of(task(seed))
        assert world == hop_slow.world_of(task(seed))
        first, second = world.chain[:2]
        assert waited(world, "lookup", first) == (second, [hop_slow.seconds_of(task(seed))])
        assert waited(world, "look", first) == (None, [])
        assert hop_slow.seconds_of(task(seed, "eval")) == 0


@pytest.mark.parametrize("level", range(len(hop_slow.LEVELS)))
def test_waits_are_spread_around_their_mean(level: int) -> None:
    mean, longest = hop_slow.LEVELS[level]
    seconds = np.array([hop_slow.seconds_of(task(seed, level=level)) for seed in range(2000)])
    assert 0.8 * mean < seconds.mean() < 1.1 * mean
    assert seconds.max() == longest
    assert np.median(seconds) < 0.75 * seconds.mean()


@pytest.mark.parametrize("seed", range(5))
def test_only_the_digit_and_the_first_letter_are_worth_anything(seed: int) -> None:
    world = hop_slow.world_of(task(seed))
    right = f"!{world.chain[-1]}{world.chain[0]}"
    answers = [right, right[:2], f"{right[:2]}{world.chain[1]}", f"{right}.", ""]
    assert [asyncio.run(world.score(answer)) for answer in answers] == [1, 0, 0, 0, 0]
    assert len(world.chain) - 1 < hop_slow.MAX_TURNS
    assert len(right) < hop.MAX_TOKENS
