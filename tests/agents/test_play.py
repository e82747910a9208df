"""Scripted play reads like live play, errs as often as it says, and repeats."""

import asyncio
import contextlib
import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest
from stand_in_server import completion, replies, stand_in

from forge_jax.agents.families import FAMILIES, family_of
from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.split import draw_from, held_out
from forge_jax.agents.tasks import (
    calc,
    desk,
    gather,
    hop,
    hop_slow,
    hop_spoken,
    maze,
    notes,
    qa,
    trail,
    wiki,
    wiki_team,
)
from forge_jax.agents.team import Team
from forge_jax.agents.white_box import ToolLoop, WindowLoop
from forge_jax.managing import OPERATIONS
from forge_jax.models.chat import built_in
from forge_jax.types import Task

LOOKUP = built_in("lookup")
PERFECT: dict[str, Any] = {
    "calc": calc.Noise(early=0.0, wrong=0.0),
    "desk": desk.Noise(lazy=0.0),
    "gather": gather.Noise(early=0.0),
    "hop": hop.Noise(early=0.0, wrong=0.0),
    "hop_slow": hop.Noise(early=0.0, wrong=0.0),
    "hop_spoken": hop_spoken.Noise(early=0.0, wrong=0.0, foreign=0.0, bad=0.0),
    "hop_tool": hop.Noise(early=0.0, wrong=0.0),
    "maze": maze.Noise(early=0.0),
    "notes": notes.Noise(forget=0.0),
    "qa": qa.Noise(shy=0.0),
    "trail": trail.Noise(early=0.0, wrong=0.0, lost=0.0),
    "wiki": wiki.Noise(shy=0.0),
    "wiki_team": wiki.Noise(shy=0.0),
}
# hop_tool is hop, but for what a program is told.
MODULES: dict[str, Any] = {
    "calc": calc,
    "desk": desk,
    "gather": gather,
    "hop": hop,
    "hop_slow": hop_slow,
    "hop_spoken": hop_spoken,
    "hop_tool": hop,
    "maze": maze,
    "notes": notes,
    "qa": qa,
    "trail": trail,
    "wiki": wiki,
    "wiki_team": wiki_team,
}
WORLDS: dict[str, Any] = {
    "calc": calc.Calc,
    "desk": desk.Desk,
    "gather": gather.Gather,
    "hop": hop.Hop,
    "hop_slow": hop_slow.SlowHop,
    "hop_spoken": hop_spoken.SpokenHop,
    "hop_tool": hop.Hop,
    "maze": maze.Maze,
    "notes": notes.Notes,
    "qa": qa.Qa,
    "trail": trail.Trail,
    "wiki": wiki.Wiki,
    "wiki_team": wiki.Wiki,
}


# What they were made of is told in a faultless episode.
TOLD = ("calc", "gather", "hop", "hop_slow", "hop_spoken", "hop_tool", "notes", "qa")


def test_every_family_is_tried() -> None:
    assert {*MODULES, "reasoning"} == set(FAMILIES)  # reasoning by test_reasoning


def text(call: ScriptedCall) -> str:
    return LOOKUP.render([*call.messages, call.reply], call.tools, add_generation_prompt=False)


def reward(world: Any, calls: tuple[ScriptedCall, ...]) -> float:
    """What an agent gets that makes these calls, in a world of its own."""
    world = copy.deepcopy(world)

    async def played() -> float:
        for asked in (one for call in calls for one in call.reply.get("tool_calls", ())):
            if asked["function"]["name"] in (*OPERATIONS, "delegate"):
                continue  # is of the agent itself
            with contextlib.suppress(BadCall):  # which the agent is told, and goes on
                arguments = json.loads(asked["function"]["arguments"])
                await world.call(asked["function"]["name"], arguments)
        score: float = await world.score(calls[-1].reply.get("content", ""))
        return score

    return asyncio.run(played())


def scripted(family: str, seed: int, noise: Any) -> tuple[Any, tuple[ScriptedCall, ...]]:
    rng = np.random.default_rng(seed)
    world = WORLDS[family](draw_from("train", MODULES[family].draw, rng))
    return world, MODULES[family].script(world, rng, noise)


def test_hop_is_written_as_lookups_and_an_answer() -> None:
    calls = hop.script(hop.Hop("ilb3"), np.random.default_rng(0), PERFECT["hop"])
    assert text(calls[-1]) == "Qi\n?i\n=l\n?l\n=b\n?b\n=3\n!3\n"


def test_notes_is_written_as_one_window_after_another() -> None:
    calls = notes.script(notes.Notes("1273"), np.random.default_rng(0), PERFECT["notes"])
    assert "".join(map(text, calls)) == (
        "P----,1\n1---\nP1---,2\n12--\nP12--,7\n127-\nP127-,3\n1273\nT1273\n!1273\n"
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_perfect_script_wins_in_the_fewest_calls(seed: int) -> None:
    world, calls = scripted("hop", seed, PERFECT["hop"])
    hops = len(world.chain) - 1
    assert reward(world, calls) == 1
    assert len(calls) == hops + 1 <= hop.MAX_TURNS
    assert len(text(calls[-1])) == 6 * hops + 6
    world, calls = scripted("notes", seed, PERFECT["notes"])
    assert (reward(world, calls), len(calls)) == (1, 5)


@pytest.mark.parametrize("family", MODULES)
def test_the_script_wins_as_often_as_it_is_meant_to(family: str) -> None:
    noise = MODULES[family].NOISE
    won = [reward(*scripted(family, seed, noise)) for seed in range(400)]
    assert 0.55 < np.mean(won) < 0.7


@pytest.mark.parametrize("family", MODULES)
def test_play_repeats_and_is_one_sample_a_call(family: str) -> None:
    play = family_of(family).play
    assert play(np.random.default_rng(3)) == play(np.random.default_rng(3))
    rng = np.random.default_rng(0)
    for calls in (play(rng) for _ in range(50)):
        for call in calls:
            prompt = LOOKUP.render(call.messages, call.tools)
            assert text(call).startswith(prompt)
            assert text(call)[len(prompt) :].count("\n") == 1


@pytest.mark.parametrize("family", [f for f in MODULES if f in TOLD])
def test_play_is_on_training_content(family: str) -> None:
    for seed in range(100):
        calls = MODULES[family].play(np.random.default_rng(seed), PERFECT[family])
        assert not held_out(content(family, calls))


def content(family: str, calls: tuple[ScriptedCall, ...]) -> str:
    """What a faultless episode was made of."""
    told = calls[0].messages[-1]["content"]
    match family:
        case "calc":
            return told.removeprefix("Q")
        case "notes":
            return calls[-1].reply["content"].removeprefix("!")
        case "qa":
            return told.removeprefix(qa.ASK)
    found = [m["content"] for m in calls[-1].messages if m["role"] == "tool"]
    return "".join([told[1:], *found])


@pytest.mark.parametrize("seed", range(20))
def test_every_hop_call_continues_the_one_before(seed: int) -> None:
    _, calls = scripted("hop", seed, hop.NOISE)
    for earlier, later in itertools.pairwise(calls):
        assert later.messages[: len(earlier.messages) + 1] == (*earlier.messages, earlier.reply)


def test_every_notes_window_begins_afresh() -> None:
    _, calls = scripted("notes", 0, notes.NOISE)
    assert [len(call.messages) for call in calls] == [1] * 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", MODULES)
def test_a_live_agent_sends_what_the_script_trains_on(family: str, seed: int) -> None:
    world, calls = scripted(family, seed, MODULES[family].NOISE)
    wanted = reward(world, calls)  # before the agent changes the world
    agent = family_of(family).agent()
    assert isinstance(agent, ToolLoop | WindowLoop | Team)

    async def live() -> tuple[float, list[Any]]:
        answer, bodies = replies(*(completion(dict(call.reply)) for call in calls))
        in_world = type(agent)(**{**vars(agent), "start": lambda task: world})
        async with stand_in(answer) as client:
            outcome = await in_world.run(Task(family=family, seed=0), client, "m")
        return outcome.reward, bodies

    got, bodies = asyncio.run(live())
    assert got == wanted
    assert [LOOKUP.render(b["messages"], b.get("tools", ())) for b in bodies] == [
        LOOKUP.render(call.messages, call.tools) for call in calls
    ]
