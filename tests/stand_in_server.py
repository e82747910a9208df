"""A stand-in for an OpenAI-compatible server: what a test says is what the model replies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from forge_jax.agents.protocol import Message

Answer = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]  # (path, body)


class Refusal(Exception):
    """Makes the server answer with this HTTP status."""


def completion(reply: Message, finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": reply, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@contextlib.asynccontextmanager
async def stand_in(answer: Answer) -> AsyncIterator[AsyncOpenAI]:
    """A client of a server that answers every call with ``answer(path, body)``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        try:
            status, reply = 200, await answer(scope["path"], json.loads(body))
        except Refusal as refusal:
            status, reply = int(str(refusal)), {"error": {"message": "refused"}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    try:
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


def replies(*scripted: Mapping[str, Any]) -> tuple[Answer, list[Mapping[str, Any]]]:
    """An answer that gives `scripted` completions in turn, and the list of bodies it was sent."""
    bodies: list[Mapping[str, Any]] = []

    async def answer(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        bodies.append(body)
        return scripted[len(bodies) - 1]

    return answer, bodies


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: str, kind: str = "function") -> Message:
    detail = {"name": name, "arguments": arguments} if kind == "function" else {}
    call = {"id": "call_0", "type": kind, kind: detail}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
