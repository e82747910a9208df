"""One call of a client: n completions of one prompt, drawn from the engine at once.

A call flows in, its completions fill up. Every call ends in one of three ways: all
its completions finished, the engine refused it, or it was aborted; and it ends once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from forge_jax.gateway.branches import Talk
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.history import Prompt
from forge_jax.gateway.messages import Piece
from forge_jax.types import Chunk, Engine, Finish, Refused

BYTES = 4  # a token
# What to do with newly read pieces of a completion.
Emit = Callable[[Completion, Chunk, list[Piece]], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class Call:
    """One call of a session; its completions are numbered by choice."""

    number: int  # of the request in its session, from 0
    draw: int  # like number, but a retry has that of its first attempt: seeds come from it
    id: str  # unique, made of characters that every protocol allows in ids
    digest: bytes  # of the request: equal for a retry
    prompt: Prompt
    arrived: float  # time.monotonic()
    hints: Mapping[str, str]  # what the client's own headers say of its session
    talk: Talk | None = None  # that it went on from; None: a prompt of text or ids
    completions: tuple[Completion, ...] = ()
    stored_bytes: int = 0  # of the request and what it goes on from, if later calls may refer to it
    delivered: bool = False  # the client was sent all of it
    aborted: bool = False  # it failed, or nobody received it
    task: "asyncio.Task[None] | None" = None  # cancelled to abort

    def begin(self, task: "asyncio.Task[None]") -> None:
        """`task` draws and answers the call."""
        self.task = task

    @property
    def finished(self) -> bool:
        """True if every completion ended and was not aborted."""
        return all(c.finish not in (None, Finish.ABORT) for c in self.completions)

    @property
    def tokens(self) -> int:
        """How many tokens the call holds, or would fit in what it holds."""
        held = sum(len(c.request.prompt) + len(c.output) for c in self.completions)
        said = sum(map(len, self.hints.values()))
        return held + (self.stored_bytes + said) // BYTES

    def abort(self) -> None:
        """Keeps what was sampled as something nobody received."""
        self.aborted = True
        for completion in self.completions:
            completion.abort(time.monotonic())

    def settle(self) -> None:
        """Lets go of what only a call that runs needs: a session may keep thousands that ended."""
        for completion in self.completions:
            completion.settle()
        self.prompt = replace(self.prompt, text="")


async def draw(engine: Engine, call: Call, emit: Emit) -> None:
    """Fills the completions of `call`, calling `emit` with each piece.

    Raises Refused where the engine does; cancelling it aborts the call in the engine.
    """
    if len(call.completions) == 1:
        await _draw_one(engine, call.completions[0], emit)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for completion in call.completions:
                group.create_task(_draw_one(engine, completion, emit))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _draw_one(engine: Engine, completion: Completion, emit: Emit) -> None:
    # An engine's iterator can be closed: that is how a request is aborted.
    chunks = cast("AsyncGenerator[Chunk, None]", engine.generate(completion.request))
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            pieces = completion.take(chunk, time.monotonic())
            # Not the completion's finish: its session may be closed as the chunk comes.
            if chunk.finish is Finish.ABORT:
                raise Refused(503, "the engine stopped before the completion ended")
            await emit(completion, chunk, pieces)
    if completion.finish is None:
        raise RuntimeError("the engine ended a completion without a finish reason")
