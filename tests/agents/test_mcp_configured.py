"""Configurations of MCP servers, and the official ones at a task."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from stand_in_server import calls, completion, replies, says, stand_in

from experiments import command
from forge_jax.agents.families import agent_of
from forge_jax.agents.runner import run_episode
from forge_jax.agents.tasks.hop import world_of
from forge_jax.config import UserError, load
from forge_jax.tool_servers import ToolsConfig, ToolServer
from forge_jax.types import Outcome, Status, Task

TASK = Task(family="hop", seed=3)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"servers": []}, "servers"),
        ({"servers": [{}]}, "give one of them"),
        ({"servers": [{"url": "host"}]}, "must begin with"),
        ({"servers": [{"command": ["x", "{home}"]}]}, "{home} is none of workdir"),
        ({"servers": [{"command": ["x"], "call_seconds": 0.0}]}, "call_seconds=0.0"),
        ({"servers": [{"command": ["x"], "shell": True}]}, "unknown key servers"),
    ],
)
def test_configurations_that_are_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        load(ToolsConfig, said)


def test_what_is_not_on_this_machine_is_refused() -> None:
    missing = ToolsConfig(servers=(ToolServer(command=("no-such-program",)),))
    with pytest.raises(UserError, match="'no-such-program' is not a program in PATH"):
        agent_of("hop", tools=missing)
    with pytest.raises(UserError, match="task='notes' has no workspace"):
        agent_of("notes", tools=ToolsConfig(servers=(ToolServer(command=("true",)),)))


@pytest.fixture(scope="session")
def node_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official servers, installed once."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on this machine")
    folder = tmp_path_factory.mktemp("node")
    names = [f"@modelcontextprotocol/server-{name}" for name in ("filesystem", "memory")]
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *names],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"npm could not install the servers: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin"


@pytest.mark.slow
def test_the_official_servers_solve_a_task(node_servers: Path) -> None:
    """A chain of hop, each lookup a file; what was found is kept in a graph beside it."""
    chain = world_of(TASK).chain
    cfg = ToolsConfig(
        servers=(
            ToolServer(
                command=(str(node_servers / "mcp-server-filesystem"), "{workdir}"),
                tools=("read_text_file", "list_directory"),
            ),
            ToolServer(
                command=(str(node_servers / "mcp-server-memory"),),
                env={"MEMORY_FILE_PATH": "{workdir}/.memory.jsonl"},
            ),
        )
    )
    reads = [completion(calls("read_text_file", json.dumps({"path": key}))) for key in chain[:-1]]
    entity = {"name": "end", "entityType": "digit", "observations": [chain[-1]]}
    scripted = [
        *reads,
        completion(calls("create_entities", json.dumps({"entities": [entity]}))),
        completion(calls("read_graph", "{}")),
        completion(says(f"!{chain[-1]}")),
    ]

    async def run(answer: Any) -> Outcome:
        async with stand_in(answer) as client:
            return await run_episode(agent_of("hop", tools=cfg), TASK, client, "m", 60.0)

    for _ in range(2):  # the second episode finds nothing of the first
        answer, bodies = replies(*scripted)
        outcome = asyncio.run(run(answer))
        assert (outcome.status, outcome.reward) == (Status.COMPLETED, 1.0), outcome.error
        found = [body["messages"][-1]["content"] for body in bodies[1 : len(chain)]]
        assert [text.strip() for text in found] == list(chain[1:])
        graph = json.loads(bodies[-1]["messages"][-1]["content"])
        assert [e["name"] for e in graph["entities"]] == ["end"]
        assert outcome.metrics["malformed_calls"] == 0


@pytest.mark.parametrize("name", ["filesystem", "memory"])
def test_the_packaged_configurations_are_read(name: str) -> None:
    with initialize_config_dir(command.CONFIGS, version_base="1.3"):
        said = compose("eval", overrides=[f"tools={name}"])
    tools = OmegaConf.to_container(said.tools, resolve=True)
    assert load(ToolsConfig, tools).servers[0].tools is not None  # type: ignore[arg-type]
