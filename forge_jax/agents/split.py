"""Which content is for training and which is held out.

A task's family, split and seed flow in, its content flows out: the same for the same
task on every machine. Content is split by its own hash, so that what is held out can
never be met in training, neither by another seed nor in scripted play.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from forge_jax.config import UserError
from forge_jax.types import Task

SPLITS = ("train", "eval")
HELD_OUT_SHARE = 8  # one content of so many is held out

Draw = Callable[[np.random.Generator], str]  # a random content, from whatever there is


def content_of(task: Task, draw: Draw) -> str:
    """The content of `task`. Raises UserError on a split or seed that does not exist."""
    return draw_from(task.split, draw, rng_of(task))


def rng_of(task: Task) -> np.random.Generator:
    """What the content of `task` is drawn with. Raises UserError as `content_of`."""
    if task.split not in SPLITS:
        raise UserError(f"split={task.split!r} must be one of {', '.join(SPLITS)}")
    if task.seed < 0:
        raise UserError(f"seed={task.seed} of a task must be >= 0")
    words = [*task.family.encode(), SPLITS.index(task.split), task.seed]
    return np.random.default_rng(words)


def level_of(task: Task, levels: int) -> int:
    """The level of a task of a family that has so many. Raises UserError on another."""
    if not 0 <= task.level < levels:
        last = levels - 1
        raise UserError(f"level={task.level} of a task of {task.family} must be from 0 to {last}")
    return task.level


def draw_from(split: str, draw: Draw, rng: np.random.Generator) -> str:
    """A random content of a split."""
    while True:
        content = draw(rng)
        if held_out(content) == (split == "eval"):
            return content


def held_out(content: str) -> bool:
    """Whether a content belongs to the held-out share."""
    return hashlib.blake2b(content.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0
