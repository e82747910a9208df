"""What a session may spend, and what it has spent.

Calls flow in as they begin, and the tokens sampled for them; a spent budget refuses further
calls and ends those that run. A completion that is cut ends as one whose tokens ran out, and
is recorded whole. Calls after each other never sample more than the budget; several at once may
go beyond it by a chunk each.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import cast

from forge_jax.config import BudgetConfig
from forge_jax.gateway.ask import Ask
from forge_jax.gateway.errors import ApiError
from forge_jax.types import Chunk, Engine, Finish, Request

SPENT = "session_budget_exceeded"


class Spending:
    """One session's use of its budget."""

    def __init__(self, budget: BudgetConfig, opened: float):
        """`opened`: when the session began, by time.monotonic()."""
        self._budget = budget
        self._opened = opened
        self._requests = 0
        self._tokens = 0
        self.exceeded = False  # a call was refused or cut

    def request(self) -> None:
        """A call is about to be drawn. Raises ApiError(429) if nothing is left for it."""
        spent = self._spent()
        if self._budget.requests is not None and self._requests >= self._budget.requests:
            spent = f"{self._budget.requests} requests"
        if spent is not None:
            self.exceeded = True
            raise ApiError(429, f"the session has spent its {spent}", code=SPENT, final=True)
        self._requests += 1

    def bounded(self, ask: Ask) -> Ask:
        """`ask`, for no more tokens than are left."""
        if self._budget.tokens is None or ask.echo_only:
            return ask
        left = self._budget.tokens - self._tokens
        if left <= 0 or (ask.max_tokens is not None and ask.max_tokens <= left):
            return ask
        shaping = {**ask.shaping}
        if "min_tokens" in shaping:
            shaping["min_tokens"] = min(left, shaping["min_tokens"])
        return replace(ask, max_tokens=left, shaping=shaping)

    def metered(self, engine: Engine) -> Engine:
        """`engine`, whose completions count and end with the budget."""
        return engine if self._budget == BudgetConfig() else Metered(engine, self)

    def take(self, chunk: Chunk) -> Chunk:
        """Counts a chunk; what was the last that there is for ends its completion."""
        self._tokens += len(chunk.ids)
        if self._spent() is None:
            return chunk
        self.exceeded = self.exceeded or chunk.finish in (None, Finish.LENGTH)
        return chunk if chunk.finish is not None else replace(chunk, finish=Finish.LENGTH)

    def _spent(self) -> str | None:
        """What of running calls is used up."""
        tokens, seconds = self._budget.tokens, self._budget.seconds
        if tokens is not None and self._tokens >= tokens:
            return f"{tokens} sampled tokens"
        if seconds is not None and time.monotonic() - self._opened >= seconds:
            return f"{seconds:g} seconds"
        return None


class Metered:
    """An engine within the budget of one session."""

    def __init__(self, engine: Engine, spending: Spending):
        self._engine = engine
        self._spending = spending

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """As the engine does, until the budget is spent."""
        chunks = cast("AsyncGenerator[Chunk, None]", self._engine.generate(request))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                told = self._spending.take(chunk)
                yield told
                if told is not chunk:
                    return
