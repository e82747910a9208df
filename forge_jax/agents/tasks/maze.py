"""maze: find the way through a maze of which only the last step is remembered, but for a note.

A seed makes a maze without circles, a start and a goal. The model is told the exits of the cell
where it is, walks, and must answer the way from the start to the goal, without its detours:

    ... Exits ES   ?E   =W   Note? E   ?W   =ES   Note? -   ?S   =*N   Note? S   !S

After each step the model is asked for a note, which then is all that is left but the step itself.
So the note has to hold the way; keeping to the right wall finds the goal with no more than that.
The reward is 1 if and only if the answer is the way. Levels are rows of LEVELS: cells on a side,
and how long the way and the walk are.

Level 0 has about 5,000 contents. Held-out mazes are never trained on, though their cells are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import calling, led, saying
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.white_box import ToolLoop
from forge_jax.managing import WRITTEN, ContextConfig
from forge_jax.types import Task

MAX_TURNS = 24  # so that each step of a walk may have a note, and who goes in circles has an end
MAX_TOKENS = 12  # of one reply
CONTEXT = ContextConfig(policy="fixed", every=1, operation="note", keep=1)
TURNS = "NESW"  # clockwise
STEPS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"N": (-1, 0), "E": (0, 1), "S": (1, 0), "W": (0, -1)}
)
GOAL = "*"
WALL = "wall"
NOWHERE = "-"  # the way to where one is
GO: Tool = {
    "type": "function",
    "function": {
        "name": "go",
        "description": f"Goes one step N, E, S or W. Tells the exits there, {GOAL} at the goal.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string"}},
            "required": ["direction"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Level:
    """How large a maze is, how long the way to its goal, and the walk there along the wall."""

    side: int
    shortest: int
    longest: int
    walk: int = 11  # at most, so that it takes MAX_TURNS with its notes


LEVELS = (
    Level(side=3, shortest=2, longest=3, walk=5),
    Level(side=4, shortest=3, longest=6),
    Level(side=5, shortest=5, longest=9),
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs at a step; the default wins about 0.6 of its level 0 episodes."""

    early: float = 0.2  # answers the way it has come, though it is not there


NOISE = Noise()


@dataclass
class Maze:
    """The world of one content: exits of all cells by rows, start and goal."""

    content: str  # "ES,W,...;0;5"
    at: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.start

    @property
    def exits(self) -> list[str]:
        return self.content.split(";")[0].split(",")

    @property
    def start(self) -> int:
        return int(self.content.split(";")[1])

    @property
    def goal(self) -> int:
        return int(self.content.split(";")[2])

    @property
    def messages(self) -> tuple[Message, ...]:
        told = f"Find {GOAL}, answer the way like !EES. Exits {self.exits[self.start]}"
        return ({"role": "user", "content": told},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (GO,)

    @property
    def way(self) -> str:
        """The only one from start to goal without a step back."""
        return way_between(self.exits, self.start, self.goal)

    def go(self, direction: str) -> str:
        """Exits of the next cell, GOAL before them where it is the goal; WALL where none is."""
        exits = self.exits
        if direction not in exits[self.at]:
            return WALL
        self.at = beside(self.at, direction, side_of(exits))
        return (GOAL if self.at == self.goal else "") + exits[self.at]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is a step in one of four directions."""
        direction = arguments.get("direction")
        if name != "go" or not isinstance(direction, str) or direction not in STEPS:
            raise BadCall("use go with N, E, S or W")  # short: a small context has to hold it
        return self.go(direction)

    async def score(self, answer: str) -> float:
        return float(answer.strip() == f"!{self.way}")


def side_of(exits: list[str]) -> int:
    """Cells on a side."""
    return round(len(exits) ** 0.5)


def beside(cell: int, direction: str, side: int) -> int:
    """The next cell in a direction."""
    down, right = STEPS[direction]
    return cell + down * side + right


def back(direction: str) -> str:
    """The direction one came from."""
    return TURNS[(TURNS.index(direction) + 2) % 4]


def way_between(exits: list[str], start: int, goal: int) -> str:
    """The steps between two cells of a maze without circles."""
    side, found, last = side_of(exits), {start: ""}, [start]
    while goal not in found:
        new = {beside(c, d, side): found[c] + d for c in last for d in exits[c]}
        last = [cell for cell in new if cell not in found]
        found |= {cell: new[cell] for cell in last}
    return found[goal]


def along_the_wall(heading: str, exits: str) -> str:
    """The next step of who keeps to the wall on the right; `heading` is the step before."""
    first = TURNS.index(heading) + 1
    return next(d for d in (TURNS[(first - i) % 4] for i in range(4)) if d in exits)


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """A random maze of a level of which the walk is not too long."""
    row = LEVELS[level]
    while True:
        exits = carved(row.side, rng)
        start, goal = (int(cell) for cell in rng.choice(row.side**2, size=2, replace=False))
        content = f"{','.join(exits)};{start};{goal}"
        fits = row.shortest <= len(way_between(exits, start, goal)) <= row.longest
        if fits and steps_of(content) <= row.walk:
            return content


def carved(side: int, rng: np.random.Generator) -> list[str]:
    """Exits of the cells of a random maze: all are reached, each on one way."""
    pairs = [(c, "E") for c in range(side * side) if (c + 1) % side]
    pairs += [(c, "S") for c in range(side * (side - 1))]
    area = list(range(side * side))  # cells that are joined have the same
    exits = [""] * len(area)
    for number in rng.permutation(len(pairs)):
        cell, direction = pairs[number]
        other = beside(cell, direction, side)
        if area[cell] == area[other]:
            continue
        exits[cell], exits[other] = exits[cell] + direction, exits[other] + back(direction)
        joined = area[other]
        area = [area[cell] if one == joined else one for one in area]
    return ["".join(d for d in TURNS if d in cell) for cell in exits]


def steps_of(content: str) -> int:
    """How many steps it takes along the wall."""
    maze, heading, steps = Maze(content), "N", 0
    while maze.at != maze.goal:
        heading, steps = along_the_wall(heading, maze.exits[maze.at]), steps + 1
        maze.go(heading)
    return steps


def world_of(task: Task) -> Maze:
    """The world that a task's family, split, seed and level make."""
    return Maze(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    manager = Manager(cfg=CONTEXT)
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS, manager=manager)


def play(
    rng: np.random.Generator,
    noise: Noise = NOISE,
    level: int = 0,
    context: ContextConfig = CONTEXT,
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode in a random training maze."""
    world = Maze(draw_from("train", partial(draw, level=level), rng))
    return script(world, rng, noise, context)


def script(
    world: Maze, rng: np.random.Generator, noise: Noise, context: ContextConfig = CONTEXT
) -> tuple[ScriptedCall, ...]:
    """Keeps to the right wall and notes the way, erring as `noise` says."""
    walker = Walker(maze=Maze(world.content), rng=rng, noise=noise, context=context)
    return led(walker, world.messages, world.tools, Manager(cfg=context), MAX_TURNS)


@dataclass
class Walker:
    """The script; implements `Leader`."""

    maze: Maze
    rng: np.random.Generator
    noise: Noise
    context: ContextConfig
    way: str = ""  # from the start, without what was gone back
    heading: str = "N"
    walked: bool = False  # since the operation that is its own to call

    def reply(self, context: Context) -> Message:
        """Answers at the goal, else takes the next step."""
        operation = self.context.operation
        if self.walked and self.context.policy == "tool" and operation is not None:
            self.walked = False
            return calling(operation, {"text": self.write()} if operation in WRITTEN else {})
        begun = len(context.messages) > 1
        if self.maze.at == self.maze.goal or (begun and self.rng.random() < self.noise.early):
            return saying(f"!{self.way}")
        self.heading = along_the_wall(self.heading, self.maze.exits[self.maze.at])
        return calling("go", {"direction": self.heading})

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        direction, self.walked = arguments["direction"], True
        returning = self.way.endswith(back(direction))
        self.way = self.way[:-1] if returning else self.way + direction
        return self.maze.go(direction)

    def write(self) -> str:
        return self.way or NOWHERE
