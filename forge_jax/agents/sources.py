"""An endless, shuffled, resumable stream of tasks, over Grain.

Family names, a seed and a split flow in, tasks flow out; the n-th task follows from
those and n alone, so the position is all there is to save.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from forge_jax.agents.families import family_of
from forge_jax.agents.split import SPLITS
from forge_jax.config import UserError
from forge_jax.types import Task

SEEDS = 1 << 20  # tasks of a family before they come again, in another order


class TaskSource:
    """Iterates over tasks, the families in turn; `state` and `restore` are exact."""

    def __init__(self, families: Sequence[str], seed: int, split: str, tasks: int = SEEDS):
        """`tasks`: different ones of each family. Raises UserError on an unknown family or split,
        or where there is no family."""
        if not families:
            raise UserError(f"families={families!r} must name at least one task family")
        if split not in SPLITS:
            raise UserError(f"split={split!r} must be one of {', '.join(SPLITS)}")
        for name in families:
            family_of(name)
        self._made_of = {"families": list(families), "seed": seed, "split": split, "tasks": tasks}
        self._tasks = _mixture(families, seed, split, tasks)
        self._next = 0

    @property
    def given(self) -> int:
        """How many tasks the source has given."""
        return self._next

    def __iter__(self) -> "TaskSource":
        return self

    def __next__(self) -> Task:
        task = self._tasks[self._next]
        self._next += 1
        return task

    def state(self) -> dict[str, Any]:
        """What the source is made of and how many tasks it has given, as plain JSON."""
        return {**self._made_of, "next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Raises UserError if it is of another source."""
        made_of = {key: value for key, value in state.items() if key != "next"}
        if made_of != self._made_of:
            raise UserError(f"a source of {self._made_of} cannot continue one of {made_of}")
        self._next = state["next"]


def _mixture(families: Sequence[str], seed: int, split: str, count: int) -> grain.MapDataset[Task]:
    def tasks(name: str) -> grain.MapDataset[Task]:
        # Every family is shuffled alike, whatever other families there are.
        numbers = grain.MapDataset.range(count).seed(seed).shuffle()
        return numbers.map(lambda number: Task(family=name, seed=int(number), split=split))

    return grain.MapDataset.mix([tasks(name) for name in families]).repeat()
