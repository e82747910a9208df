"""Real MCP servers as tools: one of its own for every episode, over stdio and HTTP."""

import asyncio
import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from stand_in_server import Refusal, calls, completion, replies, says, stand_in

from forge_jax.agents.faults import BadCall, EnvironmentFault
from forge_jax.agents.mcp import McpWorld, mcp_agent, opened
from forge_jax.agents.protocol import FolderReader
from forge_jax.agents.runner import run_episode
from forge_jax.agents.verifiers import Verifiers
from forge_jax.tool_servers import ToolsConfig, ToolServer
from forge_jax.types import Outcome, Status, Task

SERVER = str(Path(__file__).parent / "tool_server.py")
STDIO = ToolServer(command=(sys.executable, SERVER), env={"TOLD": "in {workdir}"})
TASK = Task(family="hop", seed=3)


@dataclass(frozen=True)
class Empty:
    """A task of a word; right is what the file `answer` holds, or else the answer."""

    prompt: str = "work"

    def setup(self, folder: Path) -> None:
        (folder / "given").write_text("a task")

    def score(self, folder: FolderReader, stdout: str) -> float:
        return float(stdout == "done")


@asynccontextmanager
async def world(folder: Path, *servers: ToolServer) -> AsyncIterator[McpWorld]:
    async with opened(ToolsConfig(servers=servers), Empty(), folder, Verifiers()) as found:
        yield found


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(200):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/mcp")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


@pytest.mark.parametrize("over", ["stdio", "http"])
def test_tools_of_a_server(over: str, tmp_path: Path, url: str) -> None:
    server = STDIO if over == "stdio" else ToolServer(url=url)

    async def run() -> None:
        async with world(tmp_path, server) as store:
            shapes = {tool["function"]["name"]: tool["function"] for tool in store.tools}
            assert list(shapes) == ["put", "get_value", "place", "slow", "die"]
            assert shapes["put"]["description"] == "Keeps a value."
            assert set(shapes["put"]["parameters"]["required"]) == {"key", "value"}
            assert await store.call("put", {"key": "a", "value": "1"}) == "1 kept"
            assert await store.call("get_value", {"key": "a"}) == "1"
            # What is wrong with a call is told to the model.
            assert "Error" in await store.call("get_value", {"key": "b"})
            assert "value" in await wrong(store, "put", {"key": "a"})
            with pytest.raises(BadCall, match=r"no tool get\.value; there are put"):
                await store.call("get.value", {"key": "a"})

    asyncio.run(run())


async def wrong(store: McpWorld, name: str, arguments: Mapping[str, Any]) -> str:
    """What the model reads of a call that its server does not take."""
    try:
        return await store.call(name, arguments)
    except BadCall as error:
        return str(error)


def test_an_episode_has_its_own_process_folder_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the trainer")
    folders = [tmp_path / "a", tmp_path / "b"]

    async def one(folder: Path) -> int:
        folder.mkdir()
        async with world(folder, STDIO) as store:
            assert await store.call("put", {"key": folder.name, "value": "1"}) == "1 kept"
            where, pid, *told = (await store.call("place", {})).split(" ")
            assert where == str(folder)
            assert told == ["in", str(folder), "None"]
            return int(pid)

    async def run() -> None:
        pids = await asyncio.gather(*map(one, folders))
        assert len(set(pids)) == 2
        assert not any(map(alive, pids))

    asyncio.run(run())


def test_a_server_that_hangs_or_dies_is_at_fault(tmp_path: Path) -> None:
    hasty = dataclasses.replace(STDIO, call_seconds=0.5)

    async def run() -> None:
        async with world(tmp_path, hasty) as store:
            with pytest.raises(EnvironmentFault, match=r"tool slow: no result after 0\.5 s"):
                await store.call("slow", {})
            with pytest.raises(EnvironmentFault, match="tool die: Connection closed"):
                await store.call("die", {})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (ToolServer(command=("false",)), "server 0: "),
        (ToolServer(command=(sys.executable, "-c", "raise SystemExit('no key')")), "no key"),
        (ToolServer(command=("sleep", "60"), start_seconds=0.5), "TimeoutError"),
        (ToolServer(url="http://127.0.0.1:9/mcp"), "server 0: "),
    ],
    ids=["ends", "prints", "hangs", "nothing"],
)
def test_a_server_that_does_not_start_is_at_fault(
    server: ToolServer, said: str, tmp_path: Path
) -> None:
    async def run() -> None:
        with pytest.raises(EnvironmentFault, match=said):
            async with world(tmp_path, server):
                pass

    asyncio.run(run())


def test_tools_that_are_not_there_or_there_twice(tmp_path: Path, url: str) -> None:
    async def run() -> None:
        there = ToolServer(url=url)
        with pytest.raises(EnvironmentFault, match="server 1: there is a tool put already"):
            async with world(tmp_path, there, there):
                pass
        with pytest.raises(EnvironmentFault, match="'take' is none of die"):
            async with world(tmp_path, dataclasses.replace(there, tools=("put", "take"))):
                pass
        async with world(tmp_path, dataclasses.replace(there, tools=("put",))) as store:
            assert [tool["function"]["name"] for tool in store.tools] == ["put"]

    asyncio.run(run())


def play(cfg: ToolsConfig, *scripted: Any, seconds: float = 30.0) -> tuple[Outcome, Any]:
    answer, bodies = replies(*scripted)

    async def run() -> Outcome:
        async with stand_in(answer) as client:
            agent = mcp_agent(cfg, lambda _: Empty())
            return await run_episode(agent, TASK, client, "m", seconds)

    return asyncio.run(run()), bodies


def test_an_episode(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("from the template")
    cfg = ToolsConfig(servers=(STDIO,), template=str(tmp_path))
    outcome, bodies = play(
        cfg,
        completion(calls("place", "{}")),
        completion(calls("put", '{"key": 1}')),
        completion(says("done")),
    )
    assert (outcome.status, outcome.reward, outcome.error) == (Status.COMPLETED, 1.0, "")
    assert outcome.metrics["tool_calls"] == 2
    where, pid, *_ = bodies[1]["messages"][-1]["content"].split(" ")
    assert not Path(where).exists()
    assert not alive(int(pid))
    assert "value" in bodies[2]["messages"][-1]["content"]


def test_a_fault_of_a_server_is_the_environments() -> None:
    outcome, _ = play(ToolsConfig(servers=(STDIO,)), completion(calls("die", "{}")))
    assert outcome.status is Status.ENVIRONMENT_FAILED
    assert "tool die" in outcome.error


def test_an_episode_out_of_time_leaves_no_server() -> None:
    cfg = ToolsConfig(servers=(STDIO,))
    for seconds in (1.0, 3.0, 10.0, 30.0):  # until the server has started within them
        scripted = [completion(calls("place", "{}")), completion(calls("slow", "{}"))]
        outcome, bodies = play(cfg, *scripted, seconds=seconds)
        assert outcome.status in (Status.TIMED_OUT, Status.ENVIRONMENT_FAILED)
        assert "still runs" not in outcome.error
        if len(bodies) > 1:
            break
    assert not alive(int(bodies[1]["messages"][-1]["content"].split(" ")[1]))


def test_a_refused_call_keeps_its_status(url: str) -> None:
    async def refuse(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Refusal(429)

    async def run() -> Outcome:
        async with stand_in(refuse) as client:
            agent = mcp_agent(ToolsConfig(servers=(ToolServer(url=url),)), lambda _: Empty())
            return await run_episode(agent, TASK, client, "m", 20.0)

    outcome = asyncio.run(run())
    assert outcome.status is Status.AGENT_FAILED
    assert "HTTP 429" in outcome.error
