"""One agent run becomes exactly one `Outcome`.

Whatever an agent does, the runner says what it came to: it ended, it raised, its world
broke, or it did not end in time. An unexpected failure is a value here, with its error,
because one episode must not take the others down.
"""

import asyncio
import contextvars
import math

from openai import APIStatusError, AsyncOpenAI

from forge_jax.agents.faults import EnvironmentFault
from forge_jax.agents.limits import LIMITS, UNLIMITED, WorldLimits
from forge_jax.agents.protocol import Agent
from forge_jax.types import Outcome, Status, Task

GRACE_SECONDS = 5.0  # for an agent to clean up after it was cancelled; programs need some


async def run_episode(
    agent: Agent,
    task: Task,
    client: AsyncOpenAI,
    model: str,
    timeout: float,
    limits: WorldLimits = UNLIMITED,
) -> Outcome:
    """Runs `agent` at `task` for at most `timeout` seconds, its world within `limits`.

    ENVIRONMENT_FAILED where the agent raised EnvironmentFault or its reward is not a
    finite number, AGENT_FAILED where it raised anything else (a refused call with its
    HTTP status) or returned no outcome, TIMED_OUT where it did not end; it is cancelled
    then, and abandoned if it ignores that. Raises CancelledError, after cancelling the
    agent, if the run itself is cancelled: it has no outcome then. Raises UserError where more
    calls of worlds hang in threads than there may be.
    """
    context = contextvars.copy_context()
    context.run(LIMITS.set, limits)
    running = asyncio.create_task(agent.run(task, client, model), context=context)
    running.add_done_callback(_retrieve)
    try:
        await asyncio.wait({running}, timeout=timeout)
    except asyncio.CancelledError:
        await _stop(running)
        raise
    if running.done():
        outcome = _outcome(running)
    else:
        left = "" if await _stop(running) else "; it ignored its cancellation and still runs"
        outcome = Outcome(status=Status.TIMED_OUT, error=f"no end after {timeout} s{left}")
    limits.threads.check()
    return outcome


async def _stop(running: asyncio.Future[Outcome]) -> bool:
    """Cancels an agent; True if it ended."""
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=GRACE_SECONDS)
    return bool(done)


def _retrieve(ended: asyncio.Future[Outcome]) -> None:
    # What a cancelled agent still raises is beside the point; asyncio would complain of it.
    if not ended.cancelled():
        ended.exception()


def _outcome(ended: asyncio.Future[Outcome]) -> Outcome:
    if ended.cancelled():
        return Outcome(status=Status.AGENT_FAILED, error="the agent cancelled itself")
    error = ended.exception()
    if error is None:
        return _checked(ended.result())
    if isinstance(error, EnvironmentFault):
        return Outcome(status=Status.ENVIRONMENT_FAILED, error=str(error))
    if isinstance(error, APIStatusError):
        text = f"HTTP {error.status_code}: {error.message}"
        return Outcome(status=Status.AGENT_FAILED, error=text)
    if isinstance(error, Exception):
        return Outcome(status=Status.AGENT_FAILED, error=f"{type(error).__name__}: {error}")
    raise error


def _checked(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Outcome):
        text = f"the agent returned {outcome!r}, not an Outcome"
        return Outcome(status=Status.AGENT_FAILED, error=text)
    for reward in (outcome.reward, *outcome.agents.values()):
        if math.isfinite(reward):
            continue
        # It would turn every advantage of its group, and then every weight, into NaN.
        text = f"reward={reward} is not a finite number"
        return Outcome(status=Status.ENVIRONMENT_FAILED, error=text, metrics=outcome.metrics)
    return outcome
