"""trail: what is to be remembered is gone from a managed context unless it was written down."""

import asyncio
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from forge_jax.agents.split import draw_from, held_out
from forge_jax.agents.tasks import trail
from forge_jax.config import ContextConfig
from forge_jax.types import Task

PERFECT = trail.Noise(early=0.0, wrong=0.0, lost=0.0)
MANAGED = (trail.NOTE, trail.SUMMARY)


def worlds(level: int, count: int = 20) -> list[trail.Trail]:
    rng = np.random.default_rng(level)
    return [
        trail.Trail(draw_from("train", partial(trail.draw, level=level), rng)) for _ in range(count)
    ]


@pytest.mark.parametrize("context", [trail.WHOLE, *MANAGED])
@pytest.mark.parametrize("level", range(len(trail.LEVELS)))
def test_a_faultless_script_wins_at_any_level_and_context(
    level: int, context: ContextConfig
) -> None:
    fewest, most = trail.LEVELS[level]
    for world in worlds(level):
        assert fewest <= len(world.chain) - 1 <= most
        calls = trail.script(world, np.random.default_rng(0), PERFECT, context)
        assert asyncio.run(world.score(calls[-1].reply["content"])) == 1


@pytest.mark.parametrize("context", MANAGED)
def test_the_letter_is_nowhere_but_in_what_was_written(context: ContextConfig) -> None:
    for world in worlds(1):
        calls = trail.script(world, np.random.default_rng(0), PERFECT, context)
        written = {call.reply["content"] for call in calls[:-1] if "content" in call.reply}
        for call in calls[6:]:  # behind two operations
            short = [m for m in call.messages if len(m.get("content", "xxx")) < 3]
            telling = [m for m in short if world.chain[1] in m["content"]]
            assert [message["role"] for message in telling] == ["user"]
            assert telling[0]["content"] in written


@pytest.mark.parametrize("context", [*MANAGED, ContextConfig(policy="none")])
def test_a_context_is_as_long_as_its_manager_lets_it(context: ContextConfig) -> None:
    longest = [
        max(len(c.messages) for c in trail.script(w, np.random.default_rng(0), PERFECT, context))
        for w in worlds(1)
    ]
    lookups = [len(world.chain) - 1 for world in worlds(1)]
    if context.policy == "none":
        assert longest == [1 + 2 * n for n in lookups]
    else:
        assert len(set(longest)) == 1
        assert longest[0] < 1 + 2 * min(lookups)


def test_play_is_of_training_trails_under_all_three_contexts() -> None:
    seen = set()
    for seed in range(60):
        calls = trail.play(np.random.default_rng(seed), PERFECT)
        asked = {c.messages[-1]["content"][:4] for c in calls if c.messages[-1]["role"] == "user"}
        seen |= asked & {"Note", "Summ"} or {"whole"}
        found = [json.loads(c["function"]["arguments"])["key"] for call in calls
                 for c in call.reply.get("tool_calls", ())]  # fmt: skip
        assert not held_out("".join(found) + calls[-1].reply["content"][1])
    assert seen == {"Note", "Summ", "whole"}


def test_a_program_finds_the_trail_in_its_folder_and_is_paid_for_both_characters(
    tmp_path: Path,
) -> None:
    task = Task(family="trail", seed=3, level=1)
    space, chain = trail.workspace_of(task), trail.world_of(task).chain
    space.setup(tmp_path)
    at = space.prompt[1]
    while at.isalpha():
        at = (tmp_path / at).read_text()
    assert at == chain[-1]
    answers = [f"!{at}{chain[1]}", f"!{at}{chain[0]}", f"!{at}"]
    assert [space.score(None, answer) for answer in answers] == [1, 0, 0]  # type: ignore[arg-type]
