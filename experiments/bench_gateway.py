"""The gateway under load: many sessions at once, none of their records lost.

    python -m experiments.bench_gateway [sessions=1000] [turns=4] [delay_seconds=4] [waves=2]

A gateway before a scripted engine runs in one process, agents in another. Every session plays a
task with a tool; then its record is read out and compared with what its agent was told. Prints
one JSON object: errors, lost calls and tokens, what a call takes beyond what the script waits (in
the server, from the request's head to the answer's end; at the agent), CPU a call, and memory.
"""

import asyncio
import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from experiments.bench.children import Child
from experiments.bench.gateway_server import Job
from experiments.command import command
from forge_jax.config import check, load

WORKER = (sys.executable, "-m", "experiments.bench.gateway_server")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks a key up",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_gateway.yaml`."""

    sessions: int
    turns: int
    delay_seconds: float
    waves: int

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "waves"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.delay_seconds >= 0, f"delay_seconds={self.delay_seconds} must be >= 0")


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one agent saw."""

    prompts: tuple[int, ...]  # tokens of each call's prompt, as told
    sampled: tuple[int, ...]  # ... of its answer
    seconds: tuple[float, ...]
    error: str = ""  # why it ended early


@command("bench_gateway")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return measured(load(BenchConfig, mapping))


def measured(cfg: BenchConfig) -> Mapping[str, Any]:
    """Plays all waves against one server."""
    key = secrets.token_urlsafe()
    job = Job(
        sessions=cfg.sessions, turns=cfg.turns, delay_seconds=cfg.delay_seconds, admin_key=key
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with Child("the gateway", asdict(job), log, WORKER) as child:
            waves = [_wave(cfg, child, key, number) for number in range(cfg.waves)]
    return {
        "sessions": cfg.sessions,
        "turns": cfg.turns,
        "delay_seconds": cfg.delay_seconds,
        "errors": sum(wave["errors"] for wave in waves),
        "lost_calls": sum(wave["lost_calls"] for wave in waves),
        "wrong_records": sum(wave["wrong_records"] for wave in waves),
        "waves": waves,
    }


def _wave(cfg: BenchConfig, child: Child, key: str, number: int) -> Mapping[str, Any]:
    opened = child.ask()
    began = time.perf_counter()
    played = asyncio.run(play(cfg, opened["url"]))
    seconds = time.perf_counter() - began
    full = child.ask()
    records = asyncio.run(read_out(cfg, opened["url"], key))
    closed = child.ask()
    calls = sum(len(one.sampled) for one in played)
    beyond = 1000 * (np.concatenate([one.seconds for one in played]) - cfg.delay_seconds)
    errors = [one.error for one in played if one.error]
    wave = {
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "calls": calls,
        "lost_calls": calls - closed["turns"],
        "wrong_records": sum(map(wrong, played, records)),
        "seconds": seconds,
        "calls_per_second": calls / seconds,
        "overhead_ms_p50": full["overhead_ms_p50"],
        "overhead_ms_p99": full["overhead_ms_p99"],
        "agent_ms_p50": float(np.percentile(beyond, 50)),
        "agent_ms_p99": float(np.percentile(beyond, 99)),
        "cpu_ms_per_call": 1000 * (full["cpu_seconds"] - opened["cpu_seconds"]) / calls,
        "rss_bytes_before": opened["rss_bytes"],
        "rss_bytes_full": full["rss_bytes"],
        "rss_bytes_closed": closed["rss_bytes"],
    }
    print(f"wave {number}: {wave}", file=sys.stderr, flush=True)
    return wave


def wrong(played: Played, record: Sequence[Mapping[str, Any]]) -> bool:
    """True unless a session's turns are the calls of its agent, each going on from the last."""
    prompts = tuple(len(turn["prompt_ids"]) for turn in record)
    sampled = tuple(len(turn["output_ids"]) for turn in record)
    parents = [turn["parent"] for turn in record]
    chain = [None, *range(len(record) - 1)]
    return (prompts, sampled) != (played.prompts, played.sampled) or parents != chain


async def play(cfg: BenchConfig, url: str) -> list[Played]:
    """All sessions at once, their beginnings spread over the delay of one answer."""
    tls = ssl.create_default_context()  # unused, and slow to make for each client
    starts = np.linspace(0, cfg.delay_seconds, cfg.sessions, endpoint=False).tolist()

    async def one(session: str, start: float) -> Played:
        await asyncio.sleep(start)
        # A client each: what one does for a call grows with the connections it holds.
        async with httpx.AsyncClient(base_url=url, verify=tls, timeout=None) as client:
            return await _agent(client, session, cfg.turns)

    return await asyncio.gather(*(one(f"session-{i}", start) for i, start in enumerate(starts)))


async def _agent(client: httpx.AsyncClient, session: str, turns: int) -> Played:
    talk: list[Mapping[str, Any]] = [{"role": "user", "content": f"What is {session}?"}]
    usages: list[Mapping[str, int]] = []
    seconds: list[float] = []
    error = ""
    for _ in range(turns):
        body = {"model": "m", "messages": talk, "tools": [TOOL]}
        began = time.perf_counter()
        try:
            answer = await client.post(f"/s/{session}/v1/chat/completions", json=body)
            seconds.append(time.perf_counter() - began)
            answer.raise_for_status()
        except httpx.HTTPError as failed:
            error = repr(failed)
            break
        told = answer.json()
        usages.append(told["usage"])
        message = told["choices"][0]["message"]
        talk.append(message)
        for call in message.get("tool_calls", ()):
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
    return Played(
        prompts=tuple(usage["prompt_tokens"] for usage in usages),
        sampled=tuple(usage["completion_tokens"] for usage in usages),
        seconds=tuple(seconds),
        error=error,
    )


async def read_out(cfg: BenchConfig, url: str, key: str) -> list[Sequence[Mapping[str, Any]]]:
    """The records of all sessions, through the admin route."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
        records = []
        for number in range(cfg.sessions):
            answer = await client.get(f"/sessions/session-{number}")
            records.append(answer.raise_for_status().json()["turns"])
        return records


if __name__ == "__main__":
    main()
