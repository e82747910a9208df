"""What a domain plays next: its tasks in order, at a level that follows from what was solved.

A source of tasks and how often each was solved flow in, tasks with levels flow out. The invariant:
equal outcomes, told in equal order, give equal tasks, and a restored state continues exactly.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from forge_jax.agents.families import check_level
from forge_jax.agents.sources import SEEDS, TaskSource
from forge_jax.config import CurriculumConfig, UserError
from forge_jax.types import Task

PLAIN = CurriculumConfig(levels=(0,))


class Levels:
    """The level that is played: each in turn or, with `promote`, by recent success.

    Success is the mean of the pass rates of the last `memory` tasks at the level; after a move it
    is measured anew.
    """

    def __init__(self, cfg: CurriculumConfig):
        self._cfg = cfg
        self._at = 0  # of the levels
        self._recent: list[float] = []  # pass rates at this level, the newest last

    def next(self, given: int) -> int:
        """The level of the next task, after `given` others."""
        levels = self._cfg.levels
        return levels[given % len(levels) if self._cfg.promote is None else self._at]

    def learn(self, level: int, passed: float) -> None:
        """A task of `level` was passed by a share of its episodes."""
        cfg = self._cfg
        if cfg.promote is None or level != cfg.levels[self._at]:
            return
        self._recent = [*self._recent, passed][-cfg.memory :]
        if len(self._recent) < cfg.memory:
            return
        success, before = sum(self._recent) / cfg.memory, self._at
        if success >= cfg.promote:
            self._at = min(self._at + 1, len(cfg.levels) - 1)
        elif cfg.demote is not None and success <= cfg.demote:
            self._at = max(self._at - 1, 0)
        if self._at != before:
            self._recent = []

    def state(self) -> dict[str, Any]:
        return {"curriculum": dataclasses.asdict(self._cfg) | {"levels": list(self._cfg.levels)},
                "at": self._at, "recent": list(self._recent)}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where the state is of another curriculum."""
        own = self.state()["curriculum"]
        if state["curriculum"] != own:
            raise UserError(f"a curriculum of {own} cannot continue one of {state['curriculum']}")
        self._at, self._recent = state["at"], list(state["recent"])


class Source(Protocol):
    """Where a lane's tasks come from."""

    def __next__(self) -> Task:
        """The next task; there is always one."""

    def learn(self, task: Task, passes: int, episodes: int) -> None:
        """So many of the valid episodes of `task` passed."""

    def report(self) -> dict[str, int]:
        """What there is to see: name of a measure and its value now."""

    def state(self) -> dict[str, Any]:
        """Plain JSON; a restored one continues exactly."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`. Raises UserError where it is of another source."""


class DomainTasks:
    """A family's tasks, leaving out those that were solved already where they come again."""

    def __init__(
        self,
        family: str,
        seed: int,
        tasks: int | None = None,
        curriculum: CurriculumConfig | None = None,
        solved: float | None = None,
    ):
        """`tasks`: different ones; a task with a pass rate of at least `solved`, over all its
        episodes at one level, is left out. Raises UserError on an unknown family or level."""
        self._source = TaskSource((family,), seed, "train", SEEDS if tasks is None else tasks)
        for level in (curriculum or PLAIN).levels:
            check_level(family, level)
        self._levels = Levels(curriculum or PLAIN)
        self._count, self._solved = tasks, solved
        self._passed: dict[tuple[int, int], tuple[int, int]] = {}  # (level, seed): passes, episodes
        self.skipped = 0

    def __next__(self) -> Task:
        """The next task that is not solved; where as many as there are in a row are, the last."""
        task = self._drawn()
        for _ in range((self._count or 1) - 1):
            if not self._known(task):
                break
            self.skipped += 1
            task = self._drawn()
        return task

    def learn(self, task: Task, passes: int, episodes: int) -> None:
        if not episodes:
            return
        self._levels.learn(task.level, passes / episodes)
        if self._solved is not None and self._count is not None:
            before = self._passed.get((task.level, task.seed), (0, 0))
            now = (before[0] + passes, before[1] + episodes)
            self._passed[task.level, task.seed] = now

    def report(self) -> dict[str, int]:
        return {"level": self._levels.next(self._source.given), "skipped": self.skipped}

    def state(self) -> dict[str, Any]:
        return {
            "source": self._source.state(),
            "levels": self._levels.state(),
            "passed": [[*key, *counts] for key, counts in self._passed.items()],
            "skipped": self.skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._source.restore(state["source"])
        self._levels.restore(state["levels"])
        self._passed = {(at, seed): (p, n) for at, seed, p, n in state["passed"]}
        self.skipped = state["skipped"]

    def _drawn(self) -> Task:
        level = self._levels.next(self._source.given)
        return dataclasses.replace(next(self._source), level=level)

    def _known(self, task: Task) -> bool:
        passes, episodes = self._passed.get((task.level, task.seed), (0, 0))
        return self._solved is not None and episodes > 0 and passes >= self._solved * episodes
