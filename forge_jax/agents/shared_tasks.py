"""The tasks of several domains in one stream, each in its share, for a queue that they share.

Sources of single families flow in, one source flows out. The invariant: after any number of tasks
no domain is a whole task or more ahead of its share, and a restored state continues exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.config import UserError
from forge_jax.types import Task


class SharedTasks:
    """A source that gives, each time, a task of the domain that is furthest behind its share."""

    def __init__(self, parts: Mapping[str, DomainTasks], shares: Sequence[float]):
        """`parts` by their families; `shares` add up to 1."""
        self._parts = dict(parts)
        self._shares = dict(zip(parts, shares, strict=True))
        self._given = dict.fromkeys(parts, 0)

    def __next__(self) -> Task:
        coming = sum(self._given.values()) + 1
        behind = {one: self._shares[one] * coming - self._given[one] for one in self._parts}
        family = max(behind, key=lambda one: behind[one])
        self._given[family] += 1
        return next(self._parts[family])

    def learn(self, task: Task, passes: int, episodes: int) -> None:
        """So many of the valid episodes of `task` passed."""
        self._parts[task.family].learn(task, passes, episodes)

    def report(self) -> dict[str, int]:
        """How many tasks of each family were given, and what their sources tell."""
        told = {f"admitted_{family}": count for family, count in self._given.items()}
        for family, part in self._parts.items():
            told |= {f"tasks_{name}_{family}": value for name, value in part.report().items()}
        return told

    def state(self) -> dict[str, Any]:
        parts = {family: part.state() for family, part in self._parts.items()}
        return {"shares": dict(self._shares), "given": dict(self._given), "parts": parts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where the state is of other domains or shares."""
        if state.get("shares") != self._shares:
            there = state.get("shares")
            raise UserError(f"tasks in shares of {self._shares} cannot continue those of {there}")
        for family, part in self._parts.items():
            part.restore(state["parts"][family])
        self._given = dict(state["given"])
