"""A server that is killed, or told to stop, while many sessions run."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_serve import serving

SESSIONS = 24
SCRIPT = [{"when": {"contains": "slowly"}, "text": "word " * 50, "chunks": 50, "delay_seconds": 2}]


def body(stream: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "slowly"}], "stream": stream}


async def call(client: httpx.AsyncClient, session: int) -> str:
    """One call; what became of it, "whole" if its client was told all of it."""
    path, stream = f"/s/{session}/v1/chat/completions", session % 2 == 0
    try:
        answer = await client.post(path, json=body(stream))
    except httpx.TransportError as error:
        return type(error).__name__
    if stream:
        return "whole" if answer.text.endswith("data: [DONE]\n\n") else "cut"
    return "whole" if answer.json()["choices"][0]["finish_reason"] == "stop" else "cut"


async def outcomes(url: str, act: Callable[[], None]) -> list[str]:
    """What became of one call of each session; `act` is called once all of them run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        calls = [asyncio.ensure_future(call(client, i)) for i in range(SESSIONS)]
        while f"forge_calls_running {SESSIONS}\n" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)
        act()
        return await asyncio.gather(*calls)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_clients_hear_of_it(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with serving("engine=scripted", f"script={script}", "admin_key=k") as (ready, process):
        told = asyncio.run(outcomes(ready["url"], lambda: process.send_signal(number)))
        status = process.wait(30)
    if number is signal.SIGTERM:  # every call that ran was let end
        assert (set(told), status) == ({"whole"}, 0)
    else:  # a broken connection, which no client can take for an answer
        assert status == -signal.SIGKILL
        assert set(told) <= {"RemoteProtocolError", "ReadError"}


def test_a_server_in_place_of_a_killed_one_answers_the_same_sessions_anew(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    options, key = ("engine=scripted", f"script={script}", "admin_key=k"), {"x-api-key": "k"}
    with serving(*options) as (ready, process):
        asyncio.run(outcomes(ready["url"], process.kill))
        port = ready["url"].rpartition(":")[2]
    with serving(*options, f"port={port}") as (ready, _):
        assert httpx.get(f"{ready['url']}/sessions/0", headers=key).status_code == 404
        told = asyncio.run(outcomes(ready["url"], lambda: None))
        assert set(told) == {"whole"}
        for session in range(SESSIONS):
            record = httpx.get(f"{ready['url']}/sessions/{session}", headers=key).json()
            [turn] = record["turns"]  # once, whatever was asked of the killed one
            assert turn["finish_reason"] == "stop"
