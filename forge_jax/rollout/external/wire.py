"""HTTP to an engine elsewhere: orders and streams of server-sent events.

JSON flows both ways. Invariant: whatever goes wrong, from a refused connection to a broken line,
is a `Refused` with the status that a client of ours should see; nothing is tried twice.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from forge_jax.types import Refused

CONNECT_SECONDS = 10.0
OVERFLOW = "context_length_exceeded"
OURS = (400, 413, 422)  # statuses that say that a request, not its way, is at fault


def client(url: str, key: str | None) -> httpx.AsyncClient:
    """As many connections as there are requests; tokens may take as long as they take."""
    return httpx.AsyncClient(
        base_url=url.removesuffix("/"),
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    )


async def get(http: httpx.AsyncClient, path: str) -> Any:
    """The JSON at `path`. Raises Refused."""
    async with _sound(http):
        return _json(await http.get(path))


async def post(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """The JSON that an order is answered with, None where there is none. Raises Refused."""
    async with _sound(http):
        answer = _json(await http.post(path, json=body))
    if isinstance(answer, dict) and answer.get("success") is False:
        raise Refused(502, f"{path} of the engine failed: {answer.get('message', answer)}")
    return answer


async def events(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of a stream, up to its end. Raises Refused, also where it breaks off.

    Closing it closes the connection, which is how such an engine is told to stop.
    """
    async with _sound(http), http.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise refusal(response.status_code, response.text)
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data == "[DONE]":
                return
            if line.startswith("data:"):
                yield _event(data)
    raise Refused(502, "the engine's stream broke off")


def refusal(status: int, text: str) -> Refused:
    """What a client of ours sees of an engine's answer."""
    told = _message(text)
    if status in OURS:
        long = "context length" in told or "longer than the model" in told
        return Refused(status, told, code=OVERFLOW if long else None)
    if status in (429, 503):
        return Refused(status, f"the engine is busy: {told}")
    return Refused(502, f"the engine answered {status}: {told}")


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise Refused(
            502, f"the engine's stream has a line that is no JSON: {data[:80]!r}"
        ) from None
    if not isinstance(event, dict):
        raise Refused(502, f"the engine's stream has no object: {data[:80]!r}")
    if event.get("error"):
        fault = event["error"]
        code = fault.get("code") if isinstance(fault, dict) else None
        raise refusal(code if isinstance(code, int) else 500, data)
    return event


def _json(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise refusal(response.status_code, response.text)
    try:
        return response.json() if response.content else None
    except ValueError:
        return None  # some orders are answered with a sentence


def _message(text: str) -> str:
    """The sentence in an error's body."""
    try:
        told = json.loads(text)
    except ValueError:
        return text[:500]
    while isinstance(told, dict):
        inner = next((told[k] for k in ("error", "message", "detail") if told.get(k)), None)
        if inner is None:
            break
        told = inner
    return str(told)[:500]


@asynccontextmanager
async def _sound(http: httpx.AsyncClient) -> AsyncIterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise Refused(503, f"no engine at {http.base_url}: {error}") from error
    except httpx.HTTPError as error:
        raise Refused(502, f"the engine at {http.base_url} went away: {error!r}") from error
