"""A uvicorn server inside the caller's event loop, kept up.

An ASGI application flows in, a URL flows out. A server that ends by itself, or whose socket is
lost, is begun again at the same address. The invariants: the process keeps its own signal handlers,
a restart ends no call that runs, and every call has ended when the block is left.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn

from forge_jax.config import UserError
from forge_jax.restarts import Faults

logger = logging.getLogger(__name__)

IDLE_SECONDS = 75  # longer than clients keep an idle connection: they close it, not we
LOOK_SECONDS = 0.25  # between two looks whether the socket is still there
NAME = "gateway server"  # of the task that serves


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the caller's


class _Serving:
    """One server at a time behind an address, and those that came before it."""

    def __init__(self, app: Any, host: str, drain_seconds: float):
        self._app, self._host, self._drain = app, host, drain_seconds
        self._server: _Server | None = None  # None: none serves
        self._before: list[_Server] = []  # whose calls may still run
        self._refused = Exception()  # why none serves

    async def start(self, port: int) -> None:
        """Serves at a port; 0 takes a free one. Raises UserError where it cannot be had."""
        listener = _listening(self._host, port)
        self._listener, self.port = listener, listener.getsockname()[1]
        self._number = listener.fileno()
        config = uvicorn.Config(
            self._app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=self._drain,  # type: ignore[arg-type]
        )
        self._server = server = _Server(config)
        self._running = asyncio.create_task(server.serve(sockets=[listener]), name=NAME)
        while not server.started and not self._running.done():
            await asyncio.sleep(0.001)
        if self._running.done():
            self._server = None
            listener.close()
            raise self._fault()

    async def keep(self, restarted: Callable[[], None]) -> Exception:
        """Serves again after each fault and tells `restarted`; returns the one that is the last."""
        faults = Faults()
        while True:
            began = time.monotonic()
            fault = await self.lost()
            wait = faults.wait(time.monotonic() - began)
            if wait is None:
                return fault
            restarted()
            logger.warning("the gateway's server failed, %s: %r", faults, fault)
            await asyncio.sleep(wait)
            await self.again()

    async def again(self) -> None:
        """Serves at the port as before, or not; `lost` says why then."""
        try:
            await self.start(self.port)
        except Exception as error:
            # Nobody's mistake now, whatever it would be at the start.
            self._refused = RuntimeError(f"it does not come up again: {error}")

    async def lost(self) -> Exception:
        """Returns once no server serves any more, or its socket is gone; nothing listens then."""
        if self._server is None:
            return self._refused
        while not self._running.done() and _accepts(self._listener):
            await asyncio.wait({self._running}, timeout=LOOK_SECONDS)
        fault = self._fault() if self._running.done() else OSError("its socket is lost")
        self._running.cancel()
        self._unlisten(self._server)
        self._before.append(self._server)
        self._server = None
        return fault

    def _fault(self) -> Exception:
        """Why the server has ended by itself."""
        error = None if self._running.cancelled() else self._running.exception()
        return error if isinstance(error, Exception) else RuntimeError("its task has ended")

    def _unlisten(self, server: _Server) -> None:
        """Closes the socket, whatever has become of it; connections stay as they are."""
        for one in server.servers:
            with contextlib.suppress(OSError, ValueError):  # it is closed behind asyncio's back
                one.close()
        with contextlib.suppress(OSError):
            self._listener.close()
        # Else a new socket of the number would be taken for the one that was watched.
        with contextlib.suppress(RuntimeError):  # a connection has the number already
            asyncio.get_running_loop().remove_reader(self._number)

    async def stop(self) -> None:
        """Lets running calls end, cancels those that do not, and waits for them."""
        servers = [*self._before]
        if self._server is not None:
            servers.append(self._server)
            self._server.should_exit = True
            await asyncio.wait((self._running,))
        await asyncio.gather(*(server.shutdown() for server in self._before))
        cancelled = [task for server in servers for task in server.server_state.tasks]
        if cancelled:
            await asyncio.wait(cancelled)
        if self._server is not None:
            self._running.result()


@contextlib.asynccontextmanager
async def serving(
    app: Any, host: str, port: int, drain_seconds: float, restarted: Callable[[], None]
) -> AsyncIterator[str]:
    """Serves `app` at `host`; port 0 takes a free one. Gives the root URL.

    A server that is lost serves again at the same port, see `restarts.Faults`, and `restarted` is
    told; the fault that is the last one ends the block in its place. Leaving the block stops
    accepting, gives running requests `drain_seconds`, and cancels the rest. Raises UserError where
    the address cannot be had.
    """
    served, owner = _Serving(app, host, drain_seconds), asyncio.current_task()
    assert owner is not None
    before, given_up = owner.cancelling(), asyncio.Future[Exception]()

    async def keep() -> None:
        given_up.set_result(await served.keep(restarted))
        owner.cancel()

    await served.start(port)
    keeping = asyncio.create_task(keep())
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{served.port}"
    except asyncio.CancelledError:
        if given_up.done() and owner.uncancel() <= before:
            raise given_up.result() from None
        raise
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))
        await served.stop()
        if not keeping.cancelled():
            keeping.result()


def _accepts(listener: socket.socket) -> bool:
    try:
        return listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError:
        return False


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
