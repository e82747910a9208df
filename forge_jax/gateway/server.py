"""A uvicorn server inside the caller's event loop.

An ASGI application flows in, a URL flows out. The process keeps its own signal
handlers, and every call has ended when the block is left.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from forge_jax.config import UserError

IDLE_SECONDS = 75  # longer than clients keep an idle connection: they close it, not we


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the caller's


@contextlib.asynccontextmanager
async def serving(app: Any, host: str, port: int, drain_seconds: float) -> AsyncIterator[str]:
    """Serves `app` at `host`; port 0 takes a free one. Gives the root URL.

    Leaving the block stops accepting, gives running requests `drain_seconds`, and cancels
    the rest. Raises UserError where the address cannot be had.
    """
    with _listening(host, port) as listener:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]
        )
        server = _Server(config)
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.001)
            if running.done():
                running.result()
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await _stopped(running, server)


async def _stopped(running: "asyncio.Future[None]", server: uvicorn.Server) -> None:
    """Waits for the server and for the requests it had to cancel."""
    await asyncio.wait((running,))
    cancelled = tuple(server.server_state.tasks)
    if cancelled:
        await asyncio.wait(cancelled)
    running.result()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sends small writes at once (TCP_NODELAY) only
    # where it knows them to be TCP: an answer would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"host={host} port={port}: {error.strerror}") from error
    return listener
