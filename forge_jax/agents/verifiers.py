"""Calls verifiers where they can be killed: each in a fork of a process that has its code already.

A function that scores and its arguments flow in, pickled, and a number flows out. The invariant: a
verifier that sleeps, spins or crashes is dead, with all that it started, when its call is over,
and costs its own episode only.
"""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from forge_jax.agents.faults import EnvironmentFault

logger = logging.getLogger(__name__)

FIRST_WAIT, TRIES = 0.25, 4  # seconds, doubling, until there is a process to fork from again


class Verifiers:
    """Belongs to the event loop that uses it: its process ends with that."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    async def call(
        self, score: Callable[..., float], *arguments: object, seconds: float | None
    ) -> float:
        """What ``score(*arguments)`` comes to within `seconds`.

        Raises EnvironmentFault where it raises, dies or does not end, or cannot be pickled.
        """
        try:
            order = pickle.dumps((score, arguments))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"score: goes to no other process: {error}") from error
        wait = FIRST_WAIT
        for _ in range(TRIES):
            reader, writer = await self._forked(score.__module__)
            try:
                writer.write(order)
                writer.write_eof()
                pid = await reader.readline()
                if pid:
                    return await _told(reader, int(pid), seconds)
            except ConnectionError:  # the process to fork from is gone
                pass
            finally:
                writer.close()
            logger.warning("the process that verifiers are forked from is started again")
            await asyncio.sleep(wait)
            wait *= 2
        raise EnvironmentFault("score: there is no process to fork a verifier from")

    async def _forked(self, module: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a fork that is to come."""
        if self._nursery is None or self._nursery.ended:
            self._nursery = Nursery(module)
        ours, theirs = socket.socketpair()
        with theirs, suppress(ConnectionError):
            self._nursery.fork(theirs)
        return await asyncio.open_unix_connection(sock=ours)


class Nursery:
    """One process to fork from, that has imported a module."""

    def __init__(self, module: str):
        self._ours, theirs = socket.socketpair()
        self._life = asyncio.create_task(self._live(module, theirs))

    @property
    def ended(self) -> bool:
        return self._life.done()

    def fork(self, connection: socket.socket) -> None:
        """Gives `connection` to a fork. Raises ConnectionError where the process is gone."""
        socket.send_fds(self._ours, [b"+"], [connection.fileno()])

    async def _live(self, module: str, theirs: socket.socket) -> None:
        places = os.pathsep.join(os.path.abspath(place) for place in sys.path)
        with self._ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "forge_jax.agents.verify_nursery", str(theirs.fileno()), module),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": places},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # an interrupt of the terminal is the trainer's
                )
            try:
                await process.wait()
            finally:
                self._ours.close()
                ending = asyncio.ensure_future(process.wait())
                await asyncio.wait({ending})


async def _told(reader: asyncio.StreamReader, pid: int, seconds: float | None) -> float:
    """What a fork says within `seconds`; it is dead then. Raises EnvironmentFault."""
    reply = b""
    try:
        async with asyncio.timeout(seconds):
            reply = await reader.read()
    except TimeoutError:
        raise EnvironmentFault(f"score: no end after {seconds:g} s") from None
    except ConnectionError:  # it died with something unread
        pass
    finally:
        if not reader.at_eof():  # it or something that it started has the connection, so lives
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    if not reply.endswith(b"\n"):
        raise EnvironmentFault("score: the verifier died without a word")
    scored, found = json.loads(reply)
    if not scored:
        raise EnvironmentFault(f"score: {found}")
    return float(found)
