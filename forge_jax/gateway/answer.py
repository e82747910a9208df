"""Tells one call to its client as its completions are drawn.

Chunks flow in from the engine; one JSON object or events flow out. A completion can be
found by later calls before its client has heard its end.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Send

from forge_jax.gateway.ask import Ask
from forge_jax.gateway.call import Call, draw
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.core import Core
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.exchange import EventStream, send_body
from forge_jax.gateway.messages import Piece, encoded
from forge_jax.gateway.session import Session
from forge_jax.gateway.wire import Context, Wire
from forge_jax.types import Chunk

UNREAD_SECONDS = 1.0  # that a client may leave the end of a failed stream unread


class Answer:
    """Draws the completions of one call and tells them to its client."""

    def __init__(self, core: Core, wire: Wire, session: Session, call: Call, ask: Ask):
        self._engine = session.spending.metered(core.engine)
        self._wire = wire
        self._session = session
        self._call = call
        self._context = Context(
            ask=ask,
            call=call,
            model=core.model,
            created=int(time.time()),
            tokenizer=core.chat.tokenizer,
        )
        self._writer = wire.stream(self._context)

    async def whole(self, send: Send, headers: dict[str, str]) -> None:
        """One JSON object."""

        async def take(completion: Completion, chunk: Chunk, _: list[Piece]) -> None:
            if not self._context.ask.echo_only:
                self._session.learn(completion)

        await draw(self._engine, self._call, take)
        body = encoded(self._answer())
        await send_body(send, 200, body, "application/json", headers)
        if self._context.ask.echo_only:  # what was sampled is nobody's
            self._call.abort()
        self._call.delivered = True

    async def stream(self, stream: EventStream) -> None:
        """Events as the tokens arrive."""

        async def tell(completion: Completion, chunk: Chunk, pieces: list[Piece]) -> None:
            # Before its client can answer: the next call may come with the last token.
            self._session.learn(completion)
            await stream.send(self._writer.pieces(completion, chunk, pieces))
            self._call.delivered = self._call.finished and not self._wire.told_by_end

        await draw(self._engine, self._call, tell)
        if self._context.ask.given is not None:  # a client may refer to what it has just heard
            self._answer()
        await stream.send(self._writer.end())
        self._call.delivered = True
        await stream.end()

    def _answer(self) -> Mapping[str, Any]:
        """The answer of the finished call, stored if later calls may refer to it."""
        answer, given = self._wire.answer(self._context), self._context.ask.given
        if given is not None and not self._session.closed:
            self._session.stored.add(given, answer, self._call.stored_bytes)
        return answer

    async def fail(self, stream: EventStream | None, error: ApiError) -> None:
        """Tells an error: with its status if possible, else in the stream that has begun."""
        if stream is None or not stream.begun:
            raise error
        with suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_SECONDS):
                await stream.send(self._writer.error(error))
                await stream.end()
