"""gather: values in the order of the keys, whoever asked how; lookups of one reply wait at once."""

import asyncio
import itertools
import json
from typing import Any
from unittest import mock

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.tally import Tally
from forge_jax.agents.tasks import gather
from forge_jax.agents.white_box import use_tools
from forge_jax.models.chat import built_in
from forge_jax.types import Task

WORLD = gather.Gather("ab37", seconds=2.0)


def text(call: ScriptedCall) -> str:
    return built_in("lookup").render([*call.messages, call.reply], call.tools)


def calls_of(keys: str) -> list[dict[str, Any]]:
    functions = [{"name": "lookup", "arguments": json.dumps({"key": key})} for key in keys]
    return [
        {"id": key, "type": "function", "function": f}
        for key, f in zip(keys, functions, strict=True)
    ]


@pytest.mark.parametrize(
    ("parallel", "said"),
    [(0.0, "Wab\n?a\n=3\n?b\n=7\n!37\n"), (1.0, "Wab\n?a\t?b\n=3\n=7\n!37\n")],
)
def test_the_script_asks_one_by_one_or_at_once(parallel: float, said: str) -> None:
    noise = gather.Noise(early=0.0, parallel=parallel)
    assert text(gather.script(WORLD, np.random.default_rng(0), noise)[-1]) == said


@pytest.mark.parametrize("parallel", [0.0, 1.0])
def test_either_way_wins_as_often(parallel: float) -> None:
    noise, rng = gather.Noise(parallel=parallel), np.random.default_rng(0)
    answers = [gather.script(WORLD, rng, noise)[-1].reply["content"] for _ in range(400)]
    assert abs(answers.count("!37") / 400 - (1 - noise.early)) < 0.06
    assert set(answers) == {"!37", "!3-", "!--"}, "what was not looked up is not guessed"


def test_lookups_of_one_reply_wait_at_once() -> None:
    async def used() -> tuple[list[Any], int]:
        waiting = itertools.count()
        begun = asyncio.Event()

        async def sleep(seconds: float) -> None:
            assert seconds == 2.0
            if next(waiting) == 1:
                begun.set()
            await asyncio.wait_for(begun.wait(), 5)  # nobody goes on before both have begun

        tally = Tally()
        with mock.patch.object(gather.asyncio, "sleep", sleep):
            found = await use_tools(WORLD, calls_of("ba"), tally)
        assert (tally.calling_replies, tally.parallel_replies, tally.tool_calls) == (1, 1, 2)
        await use_tools(gather.Gather("ab37"), calls_of("a"), tally)
        assert (tally.calling_replies, tally.parallel_replies) == (2, 1)
        return [one["content"] for one in found], next(waiting)

    assert asyncio.run(used()) == (["7", "3"], 2)


def test_every_value_counts_and_nothing_else() -> None:
    answers = ["!37", "!73", "!3", "!3-", "37", "!37 ", ""]
    assert [asyncio.run(WORLD.score(answer)) for answer in answers] == [1, 0, 0, 0, 0, 0, 0]
    assert WORLD.look_up("c") == gather.ABSENT
    with pytest.raises(BadCall):
        asyncio.run(WORLD.call("lookup", {"key": 3}))


@pytest.mark.parametrize("level", range(len(gather.LEVELS)))
def test_levels_are_numbers_of_keys_that_fit_a_reply_and_an_episode(level: int) -> None:
    world = gather.world_of(Task(family="gather", seed=1, level=level))
    assert len(world.keys) == len(set(world.keys)) == gather.LEVELS[level] < gather.MAX_TURNS
    at_once = gather.play(np.random.default_rng(0), gather.Noise(early=0.0, parallel=1.0), level)
    assert len(at_once) == 2
    reply = built_in("lookup").render([at_once[0].reply], at_once[0].tools)
    assert len(reply) <= gather.MAX_TOKENS


def test_waits_are_spread_around_their_mean_and_held_out_tasks_have_none() -> None:
    tasks = [Task(family="gather", seed=seed) for seed in range(1000)]
    seconds = np.array([gather.seconds_of(task) for task in tasks])
    assert [gather.world_of(task).seconds for task in tasks[:9]] == seconds[:9].tolist()
    assert abs(seconds.mean() / gather.MEAN - 1) < 0.1
    assert 0 < seconds.min() < seconds.max() <= gather.LONGEST
    assert gather.seconds_of(Task(family="gather", seed=0, split="eval")) == 0
