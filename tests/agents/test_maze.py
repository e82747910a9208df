"""maze: one way from start to goal, the wall leads there, only the way pays."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.split import draw_from, held_out
from forge_jax.agents.tasks import maze
from forge_jax.config import ContextConfig

PERFECT = maze.Noise(early=0.0)
# A B C    A leads to B, B to C and E; the rest hangs on E and D.
# D E F
# G H I
CROSS = "E,ESW,W,E,NEW,SW,E,EW,NW"


def drawn(level: int, count: int) -> list[maze.Maze]:
    rng = np.random.default_rng(level)
    return [maze.Maze(maze.draw(rng, level)) for _ in range(count)]


@pytest.mark.parametrize("level", range(len(maze.LEVELS)))
def test_every_cell_is_reached_on_one_way_and_exits_have_two_sides(level: int) -> None:
    row = maze.LEVELS[level]
    for world in drawn(level, 30):
        exits, side = world.exits, row.side
        assert len(exits) == side * side
        assert sum(map(len, exits)) == 2 * (side * side - 1)  # a tree, if all is reached
        for cell, ways in enumerate(exits):
            assert all(maze.back(d) in exits[maze.beside(cell, d, side)] for d in ways)
            assert len(maze.way_between(exits, 0, cell)) < side * side
        assert row.shortest <= len(world.way) <= row.longest
        assert maze.steps_of(world.content) <= row.walk < maze.MAX_TURNS / 2


def test_only_the_way_pays() -> None:
    world = maze.Maze(f"{CROSS};0;5")
    assert world.way == "ESE"
    for wrong in ("ESE", "!ES", "!EESE", "!", "", "!ese", "!E S E"):
        assert asyncio.run(world.score(wrong)) == 0
    assert asyncio.run(world.score("!ESE\n")) == 1
    assert [world.go(d) for d in "EWNES"] == ["ESW", "E", maze.WALL, "ESW", "NEW"]
    assert world.go("E") == "*SW"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("walk", {"direction": "N"}), ("go", {}), ("go", {"direction": "up"}), ("go", {"to": "N"})],
)
def test_what_is_no_step_is_a_bad_call(name: str, arguments: dict[str, str]) -> None:
    with pytest.raises(BadCall, match="go"):
        asyncio.run(maze.Maze(f"{CROSS};0;5").call(name, arguments))


def test_the_script_notes_the_way_without_its_detours() -> None:
    world = maze.Maze(f"{CROSS};0;5")
    calls = maze.script(world, np.random.default_rng(0), PERFECT)
    said = [c.reply.get("content") for c in calls]
    # To the right first: north of E is B again, so C comes only if it lies that way.
    assert said[-1] == "!ESE"
    notes = [text for text in said[:-1] if text is not None]
    steps = [
        c.reply["tool_calls"][0]["function"]["arguments"][-3]
        for c in calls
        if c.reply.get("tool_calls")
    ]
    way = ""
    for step, note in zip(steps, notes, strict=True):
        way = way[:-1] if way.endswith(maze.back(step)) else way + step
        assert note == (way or maze.NOWHERE)


@pytest.mark.parametrize("level", range(len(maze.LEVELS)))
def test_the_context_stays_as_small_however_far_one_walks(level: int) -> None:
    for world in drawn(level, 10):
        calls = maze.script(world, np.random.default_rng(0), PERFECT)
        assert calls[-1].reply["content"] == f"!{world.way}"
        assert max(len(call.messages) for call in calls) <= 1 + 1 + 2 * 2 + 1


@pytest.mark.parametrize(
    "context",
    [
        ContextConfig(),
        ContextConfig(policy="tool", operation="note", keep=2),
        ContextConfig(policy="fixed", every=3, operation="summarise"),
        ContextConfig(policy="threshold", budget=30, share=1.0, operation="truncate", characters=2),
    ],
    ids=lambda context: f"{context.policy}-{context.operation}",
)
def test_the_script_wins_however_its_context_is_managed(context: ContextConfig) -> None:
    for world in drawn(0, 10):
        calls = maze.script(world, np.random.default_rng(0), PERFECT, context)
        assert calls[-1].reply["content"] == f"!{world.way}"


@pytest.mark.parametrize("level", range(len(maze.LEVELS)))
def test_mazes_of_training_are_not_held_out(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def kept(
        split: str, draw: Callable[[np.random.Generator], str], rng: np.random.Generator
    ) -> str:
        seen.append(draw_from(split, draw, rng))
        return seen[-1]

    monkeypatch.setattr(maze, "draw_from", kept)
    for seed in range(20):
        maze.play(np.random.default_rng(seed), level=level)
    assert not any(map(held_out, seen))
    rng, draw = np.random.default_rng(0), partial(maze.draw, level=level)
    assert all(held_out(draw_from("eval", draw, rng)) for _ in range(5))
