"""Groups that need not wait for their slowest episodes.

Running episodes flow in; those that a group goes on without are told to end, or the group is to be
given up. The invariant: every episode of a group that goes on still comes to exactly one outcome,
and none is told to end unless enough of its siblings have completed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from forge_jax.types import Episode


@dataclass(frozen=True, kw_only=True)
class GroupDeadline:
    """When a group has its end though not all of its episodes have."""

    seconds: float  # since its start
    least: int  # episodes that must have completed then; with fewer the group is given up


async def expire(
    runs: Sequence[asyncio.Task[Episode]],
    limits: Sequence[asyncio.Timeout],
    deadline: GroupDeadline,
) -> bool:
    """Returns when all of `runs` have ended or `deadline` is over: True, after letting the limits
    of those that run, one for each run, run out; False where too few have completed for that."""
    await asyncio.wait(runs, timeout=deadline.seconds)
    left = [i for i, run in enumerate(runs) if not run.done()]
    enough = sum(run.done() and _completed(run) for run in runs) >= deadline.least
    if left and not enough:
        return False
    for i in left:
        limits[i].reschedule(asyncio.get_running_loop().time())
    return True


def _completed(run: asyncio.Task[Episode]) -> bool:
    return not run.cancelled() and run.exception() is None and run.result().outcome.valid
