"""Groups that need not wait for their slowest episodes.

Running episodes flow in, those that a group goes on without are told to end. The invariant: every
episode still comes to exactly one outcome, and nothing is told to end before enough of its
siblings have completed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from forge_jax.types import Episode


@dataclass(frozen=True, kw_only=True)
class GroupDeadline:
    """When a group is complete that not all episodes of have ended."""

    seconds: float  # since its start
    least: int  # episodes that must have completed, however long it takes


async def expire(
    runs: Sequence[asyncio.Task[Episode]],
    limits: Sequence[asyncio.Timeout],
    deadline: GroupDeadline,
) -> None:
    """Returns when all of `runs` have ended, or, once `deadline` says that they are enough, after
    letting the limits of the others, one for each run, run out."""
    await asyncio.wait(runs, timeout=deadline.seconds)
    while left := [i for i, run in enumerate(runs) if not run.done()]:
        if sum(run.done() and _completed(run) for run in runs) >= deadline.least:
            for i in left:
                limits[i].reschedule(asyncio.get_running_loop().time())
            return
        await asyncio.wait([runs[i] for i in left], return_when=asyncio.FIRST_COMPLETED)


def _completed(run: asyncio.Task[Episode]) -> bool:
    return not run.cancelled() and run.exception() is None and run.result().outcome.valid
