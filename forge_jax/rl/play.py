"""One agent run becomes one `Episode`, whatever the agent does.

A task goes in, its outcome and the token-exact calls come out. A session of the gateway is
open exactly as long as its episode, and no episode can guess the session of another.
"""

import asyncio
import dataclasses
import secrets
import time
from dataclasses import dataclass, field

import numpy as np
from openai import AsyncOpenAI

from forge_jax.agents.limits import WorldLimits
from forge_jax.agents.protocol import Agent
from forge_jax.agents.runner import run_episode
from forge_jax.config import BudgetConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.rl.health import Health
from forge_jax.rl.partial import GroupDeadline, expire
from forge_jax.types import Episode, Outcome, Status, Task


@dataclass(frozen=True, kw_only=True)
class Player:
    """Plays tasks; every episode is a session of its own with its own seed."""

    agent: Agent
    gateway: Gateway
    url: str  # root of the gateway
    client: AsyncOpenAI  # shared by all agents
    model: str
    purpose: str  # "train" or "eval": part of the session's name and seed
    seed: int  # of the run
    temperature: float
    seconds: float  # limit of an episode
    budget: BudgetConfig = field(default_factory=BudgetConfig)  # of its calls
    limits: WorldLimits = field(default_factory=WorldLimits)  # of its world
    health: Health = field(default_factory=Health)  # of the engine

    async def group(
        self, item: int, task: Task, size: int, deadline: GroupDeadline | None = None
    ) -> tuple[Episode, ...] | None:
        """`size` episodes of one task, at once; those that `deadline` does not wait for are
        EXPIRED. None where too few have completed for that, and none has an outcome. A group whose
        engine failed is played again."""
        return await self.health.unbroken(lambda: self._group(item, task, size, deadline))

    async def _group(
        self, item: int, task: Task, size: int, deadline: GroupDeadline | None
    ) -> tuple[Episode, ...] | None:
        limits = [asyncio.timeout(None) for _ in range(size)]
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(self._episode(item, i, task, limit))
                for i, limit in enumerate(limits)
            ]
            if deadline is not None and not await expire(runs, limits, deadline):
                for run in runs:
                    run.cancel()
        return None if any(run.cancelled() for run in runs) else tuple(r.result() for r in runs)

    async def episode(self, item: int, replica: int, task: Task) -> Episode:
        """One episode. Its tokens depend on (seed, item, replica), not on what runs beside it; if
        its engine failed, it is played again.

        With a budget its outcome has "over_budget" among its metrics: 1 if calls were refused or
        cut for that, else 0.
        """
        return await self.health.unbroken(
            lambda: self._episode(item, replica, task, asyncio.timeout(None))
        )

    async def _episode(
        self, item: int, replica: int, task: Task, limit: asyncio.Timeout
    ) -> Episode:
        """EXPIRED, with the calls it has made, where `limit` runs out."""
        name = self.name(item, replica)
        # Who knows a session's name may read in it; what the model reads depends on `ids` alone.
        session = f"{name}-{secrets.token_urlsafe(16)}"
        self.gateway.open(
            session,
            ids=name,
            seed=session_seed(self.seed, self.purpose, item, replica),
            temperature=self.temperature,
            budget=self.budget,
        )
        try:
            client = self.client.with_options(base_url=f"{self.url}/s/{session}/v1")
            outcome = await self._outcome(task, client, limit)
            if self.budget != BudgetConfig():
                over = float(self.gateway.over_budget(session))
                told = {**outcome.metrics, "over_budget": over}
                outcome = dataclasses.replace(outcome, metrics=told)
        finally:
            turns = self.gateway.close(session)
        return Episode(item=item, replica=replica, task=task, outcome=outcome, turns=turns)

    async def _outcome(self, task: Task, client: AsyncOpenAI, limit: asyncio.Timeout) -> Outcome:
        try:
            async with limit:
                return await run_episode(
                    self.agent, task, client, self.model, self.seconds, self.limits
                )
        except TimeoutError:
            return Outcome(status=Status.EXPIRED, error="enough of its group had completed")

    def name(self, item: int, replica: int) -> str:
        """What ids of an episode's calls are made of, and their seeds."""
        return f"{self.purpose}-{item}-{replica}"


def session_seed(seed: int, purpose: str, item: int, replica: int) -> int:
    """A 31-bit seed for one session, independent between sessions."""
    words = [seed, *purpose.encode(), item, replica]
    return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)


async def remote_episode(
    agent: Agent, client: AsyncOpenAI, model: str, number: int, task: Task, seconds: float
) -> Episode:
    """One episode against a server that is not ours: its outcome, without token-exact turns.

    The metrics of the outcome have the wall time of the episode as "seconds".
    """
    began = time.perf_counter()
    outcome = await run_episode(agent, task, client, model, seconds)
    took = {**outcome.metrics, "seconds": time.perf_counter() - began}
    timed = dataclasses.replace(outcome, metrics=took)
    return Episode(item=number, replica=0, task=task, outcome=timed, turns=())
