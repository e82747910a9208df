"""The server's end of the gateway's benchmark: a gateway before a scripted engine.

A job comes in as the first line of stdin, then a line for each step: sessions are opened, told
of once their calls have ended, closed, and opened again. Answers go out as JSON lines. A call's
time is measured around the whole application and told less what the script waits.
"""

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.server import serving
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine

CALL = 'Look.<tool_call>{"name": "{tool}", "arguments": {arguments}}</tool_call>'
ANSWER = "It is 42."


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is served."""

    sessions: int
    turns: int  # calls of a session: of a tool, but for the last
    delay_seconds: float  # that an answer takes
    admin_key: str


class Timed:
    """An ASGI application that remembers how long calls take."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.seconds: list[float] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        await self._app(scope, receive, send)
        if scope["method"] == "POST":
            self.seconds.append(time.perf_counter() - began)


def main() -> None:
    asyncio.run(serve(Job(**json.loads(sys.stdin.readline()))))


async def serve(job: Job) -> None:
    """Answers each line of stdin with the next state of the server, until it ends."""
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    last = Rule(when=When(call=job.turns - 1), text=ANSWER, delay_seconds=job.delay_seconds)
    rules = (last, Rule(text=CALL, delay_seconds=job.delay_seconds))
    engine = ScriptedEngine(rules, chat.tokenizer, chat.stop_ids[0])
    gateway = Gateway(engine, chat, "scripted", job.admin_key, GatewayConfig(undeclared=False))
    app = Timed(gateway.app)
    async with serving(app, "127.0.0.1", 0, drain_seconds=0, restarted=lambda: None) as url:
        while await next_step():
            names = [f"session-{number}" for number in range(job.sessions)]
            for name in names:
                gateway.open(name)
            say(url=url, **state())
            await next_step()
            say(**state(), **overhead(app.seconds, job.delay_seconds))
            await next_step()
            turns = [len(gateway.close(name)) for name in names]
            app.seconds.clear()
            gc.collect()
            say(**state(), turns=sum(turns), sessions=len(turns))


async def next_step() -> str:
    """The next line of stdin, "" at its end."""
    return await asyncio.to_thread(sys.stdin.readline)


def say(**told: Any) -> None:
    """Prints one line of JSON."""
    print(json.dumps(told), flush=True)


def state() -> dict[str, float]:
    """Memory and CPU seconds of this process (Linux)."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "cpu_seconds": time.process_time()}


def overhead(seconds: list[float], delay: float) -> dict[str, float]:
    """Milliseconds of calls beyond what the script waited."""
    beyond = 1000 * (np.array(seconds) - delay)
    p50, p99 = np.percentile(beyond, (50, 99))
    return {"calls": len(seconds), "overhead_ms_p50": float(p50), "overhead_ms_p99": float(p99)}


if __name__ == "__main__":
    main()
