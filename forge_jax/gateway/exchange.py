"""The HTTP side of one call, below any protocol: bodies, streams, clients that go away.

ASGI messages flow in and out. Work for a client that has gone is cancelled before
this returns, and a stream begins with its first event, so that an error before it can
still have a status of its own.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Send

from forge_jax.gateway.errors import ApiError, ClientGone

COMMENT = b": keep-alive\n\n"  # a server-sent event that clients pass over
DRAINED = 4  # bodies up to this many times the limit are read to their end, to be refused


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError(413) above `limit` bytes, ClientGone if it breaks off."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        # A client hears of the refusal only once it has sent its body.
        if not message.get("more_body", False) or size > DRAINED * limit:
            break
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes")
    return b"".join(parts)


async def send_body(
    send: Send, status: int, body: bytes, kind: str, headers: Mapping[str, str]
) -> None:
    """A complete response."""
    fields = {"content-type": kind, "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _raw(fields)})
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """Server-sent events; headers go out with the first of them."""

    def __init__(self, send: Send, headers: Mapping[str, str], keep_alive: bytes):
        self._send = send
        self._headers = headers
        self._keep_alive = keep_alive
        self._lock = asyncio.Lock()
        self._quiet = True  # nothing was sent since the last keep-alive was due
        self.begun = False

    async def send(self, events: list[bytes]) -> None:
        """Sends events in one piece."""
        if events:
            self._quiet = False
            await self._write(b"".join(events), True)

    async def keep_alive(self) -> None:
        """Sends a sign of life if nothing else was sent since the last call."""
        if self._quiet:
            await self._write(self._keep_alive, True)
        self._quiet = True

    async def end(self) -> None:
        """Ends the response."""
        await self._write(b"", False)

    async def _write(self, body: bytes, more: bool) -> None:
        async with self._lock:
            if not self.begun:
                self.begun = True
                fields = {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                    **self._headers,
                }
                start = {"type": "http.response.start", "status": 200, "headers": _raw(fields)}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def unless_gone(
    receive: Receive,
    work: Coroutine[Any, Any, None],
    begun: Callable[["asyncio.Task[None]"], None],
    seconds: float,
    keep_alive: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Runs `work` to its end unless the client goes away first.

    `begun` is given its task; `keep_alive` is called every `seconds`. Raises what `work`
    raises, ClientGone if the client left, and CancelledError if the task was cancelled.
    """
    task = asyncio.ensure_future(work)
    begun(task)
    watcher = asyncio.ensure_future(_disconnect(receive, seconds, keep_alive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watcher.result()
            raise ClientGone
        task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnect(
    receive: Receive, seconds: float, keep_alive: Callable[[], Awaitable[None]] | None
) -> None:
    """Returns when the client has gone."""
    while True:
        try:
            async with asyncio.timeout(None if keep_alive is None else seconds):
                message = await receive()
        except TimeoutError:
            assert keep_alive is not None
            await keep_alive()
            continue
        if message["type"] == "http.disconnect":
            return


@functools.lru_cache(maxsize=1024)
def _field(name: str, value: str) -> tuple[bytes, bytes]:
    return name.encode("latin-1"), value.encode("latin-1")


def _raw(fields: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [_field(name, value) for name, value in fields.items()]
