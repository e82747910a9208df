"""What goes wrong between a client and its gateway: a refusal, a long wait, a stream that is cut.

The name of a fault flows in, rules of a script and a proxy flow out. Only the first call meets the
fault, so that a client that asks again is answered.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from forge_jax.rollout.script import Rule, When

NONE, REFUSED, SLOW, CUT = "", "refused", "slow", "cut"
FAULTS = (NONE, REFUSED, SLOW, CUT)
EVENTS = 3  # of a stream, before it is cut
SECONDS = 5.0  # that a slow reply takes


def first_call(fault: str, text: str) -> list[Rule]:
    """What the script says to the first call, before all its other rules; `text` comes slowly."""
    first = When(call=0)
    if fault == NONE:
        return []
    if fault == REFUSED:
        return [Rule(when=first, fail_status=429)]
    return [Rule(when=first, text=text, chunks=50, delay_seconds=SECONDS)]


@asynccontextmanager
async def cut_once(url: str) -> AsyncIterator[str]:
    """The URL of a proxy that drops the first stream it sees, after some of its events."""
    host, port = url.removeprefix("http://").split(":")
    cut = False

    async def up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cut
        events = 0
        with suppress(ConnectionError):
            while (cut or events < EVENTS) and (data := await reader.read(1 << 16)):
                writer.write(data)
                await writer.drain()
                events += data.count(b"\ndata: ") + data.startswith(b"data: ")
        cut = cut or events >= EVENTS
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        asking = asyncio.create_task(up(reader, to_server))
        await down(from_server, writer)
        asking.cancel()
        to_server.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
