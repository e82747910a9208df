"""Items that an error of our own broke: one outcome each, until there are too many in a row.

Errors of the code that plays flow in, a group without anything to train on flows out. The
invariant: each is counted, and told once with its trace; a fault that stays ends the run.
"""

import logging

from forge_jax.config import UserError
from forge_jax.types import Episode, Outcome, Status, Task

Group = tuple[Episode, ...]
logger = logging.getLogger(__name__)


class Broken:
    """Those of a run so far."""

    def __init__(self, most: int):
        """`most`: in a row, at which the run ends."""
        self.count = 0
        self._most, self._row = most, 0

    def whole(self, group: Group | None) -> Group | None:
        """The group of an item that came to its end by itself."""
        self._row = 0
        return group

    def group(self, number: int, task: Task, error: Exception) -> Group:
        """What the item comes to. Raises `error` where it is the caller's mistake, RuntimeError
        where it is the last in a row that there may be."""
        if isinstance(error, UserError):
            raise error
        if isinstance(error, ExceptionGroup) and error.subgroup(UserError) is not None:
            raise error
        cause = _first(error)
        told = f"{type(cause).__name__}: {cause}"
        self.count, self._row = self.count + 1, self._row + 1
        if self._row >= self._most:
            raise RuntimeError(
                f"protect.most_broken={self._most} items in a row were broken by errors of our "
                f"own, item {number} by {told}"
            ) from error
        logger.error("item %d was broken by an error of our own", number, exc_info=error)
        outcome = Outcome(status=Status.ENVIRONMENT_FAILED, error=f"an error of our own: {told}")
        return (Episode(item=number, replica=0, task=task, outcome=outcome, turns=()),)


def _first(error: Exception) -> Exception:
    """The first error that is no group of others."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
