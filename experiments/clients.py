"""Plays agents as they are published before a scripted engine, and holds their records to the laws.

    python -m experiments.clients [names=[codex,aider]] [fault=cut] [install=FOLDER]

Each is installed into a folder of its own, unless it is there, and does one task of two steps as
the program of `configs/agent/NAME.yaml`: it reads a file and says what it holds. Prints a table,
and as the last line `{"clients": [...], "failed": [...]}`: one account a client, and the names of
those that did not do the task or broke a law. Needs npm, and a network to install from.
"""

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from experiments.client_faults import CUT, FAULTS, NONE, cut_once, first_call
from experiments.client_laws import Counted, account, broken
from experiments.command import CONFIGS, command
from forge_jax.agents.black_box import black_box
from forge_jax.agents.protocol import FolderReader
from forge_jax.agents.runner import run_episode
from forge_jax.config import ProgramConfig, UserError, check, load
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Outcome, Task

FOLDER = Path(sys.prefix) / "share" / "forge_jax" / "clients"
INSTALL_SECONDS = 900
FOUND = "amber-7391"  # what the drawer holds; no prompt has it before a tool has read it
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent is told the end
TEST = "cat drawer.txt; diff drawer.txt answer.txt"
SHOWN = ("client", "version", "done", "branches", "replies", "sampled", "trained", "left_out")


@dataclass(frozen=True, kw_only=True)
class Client:
    """Where an agent comes from, and what the model says to it."""

    npm: str | None = None  # package
    pip: tuple[str, ...] = ()  # packages, the client's own first
    first: str  # the reply to the task
    last: str = f"It holds {FOUND}."  # once a prompt tells what the drawer holds
    tools: bool = True  # whether the calls of its task offer tools; else it has them in its text
    aside: str = "A drawer"  # to calls without tools beside the task: titles
    arguments: tuple[str, ...] = ()  # that its command has beside those of its configuration

    @property
    def package(self) -> str:
        return self.npm or self.pip[0]

    def rules(self) -> list[Rule]:
        return [
            Rule(when=When(contains=FOUND), text=self.last, chunks=4),
            Rule(when=When(tools=self.tools or None), text=self.first, chunks=4),
            Rule(text=self.aside),
        ]


def edit(content: str) -> str:
    """A reply that writes a file whole, as aider reads it."""
    return f"I write it.\n\nanswer.txt\n```\n{content}\n```"


def shell(name: str, arguments: str) -> str:
    """A reply that calls a tool, spaced as no client would write it."""
    call = f'{{"name": "{name}", "arguments": {{{arguments} }}}}'
    return f"Let me look.\n<tool_call>\n{call}\n</tool_call>"


READ = '"command" : "cat drawer.txt"'
CLIENTS: Mapping[str, Client] = {
    "codex": Client(npm="@openai/codex", first=shell("exec_command", '"cmd" : "cat drawer.txt"')),
    "opencode": Client(npm="opencode-ai", first=shell("bash", f'{READ},  "description":"Reads"')),
    "claude-code": Client(
        npm="@anthropic-ai/claude-code", first=shell("Bash", f'{READ},  "description":"Reads"')
    ),
    # It has no tools: what it learns is the output of a test, which it is asked to mend.
    "aider": Client(
        pip=("aider-chat",),
        tools=False,
        first=edit("?"),
        last=edit(FOUND),
        arguments=("--edit-format", "whole", "--auto-test", "--test-cmd", TEST, "answer.txt"),
    ),
    "qwen-agent": Client(
        pip=("qwen-agent", "soundfile", "tqdm", "python-dateutil"),  # the last: what it forgets
        tools=False,
        first=shell("shell", READ),
    ),
    "mini-swe-agent": Client(
        pip=("mini-swe-agent",),
        first=shell("bash", READ),
        last=shell("bash", f'"command": "echo {SUBMIT} && echo {FOUND}"'),
    ),
    "openai-agents": Client(pip=("openai-agents",), first=shell("shell", READ)),
    "langgraph": Client(pip=("langgraph", "langchain-openai"), first=shell("shell", READ)),
    "smolagents": Client(
        pip=("smolagents[openai]",),
        first=shell("shell", READ),
        last=shell("final_answer", f'"answer": "{FOUND}"'),
    ),
    "pydantic-ai": Client(pip=("pydantic-ai-slim[openai]",), first=shell("shell", READ)),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which clients to play."""

    names: tuple[str, ...] = tuple(CLIENTS)
    install: str | None = None  # folder; null: beside the packages of this Python
    fault: str = NONE  # of its first call: refused | slow | cut
    seconds: float = 120.0  # of an episode

    def __post_init__(self) -> None:
        for name in self.names:
            check(name in CLIENTS, f"names={name!r} is none of {', '.join(CLIENTS)}")
        check(self.fault in FAULTS, f"fault={self.fault!r} must be one of {FAULTS}")
        check(self.seconds > 0, f"seconds={self.seconds} must be > 0")


class Drawer:
    """The world: a file whose content is asked for."""

    prompt = "Read the file drawer.txt here with a tool, then answer with what it holds."

    def setup(self, folder: Path) -> None:
        (folder / "drawer.txt").write_text(f"{FOUND}\n")

    def score(self, folder: FolderReader, stdout: str) -> float:
        return float(FOUND in stdout)


@command("clients")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(Config, mapping)
    rows = [asyncio.run(play(name, cfg)) for name in cfg.names]
    show(rows)
    failed = [row["client"] for row in rows if row["broken"] or not row["done"]]
    return {"clients": rows, "failed": failed}


async def play(name: str, cfg: Config) -> dict[str, Any]:
    """The account of one client, which is installed first."""
    client = CLIENTS[name]
    folder = Path(cfg.install) if cfg.install else FOLDER
    version = install(client, folder / name)
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    rules = [*first_call(cfg.fault, client.first), *client.rules()]
    engine = Counted(ScriptedEngine(rules, chat.tokenizer, chat.stop_ids[0]))
    gateway = Gateway(engine, chat, "scripted", "admin")
    gateway.open(name)
    agent = black_box(program(client, name, folder / name), lambda _: Drawer())
    print(f"{name} {version}: playing", file=sys.stderr, flush=True)
    began = time.monotonic()
    async with (
        gateway.running() as root,
        cut_once(root) if cfg.fault == CUT else nullcontext(root) as url,
        AsyncOpenAI(base_url=f"{url}/s/{name}/v1", api_key="any") as at,
    ):
        task = Task(family="drawer", seed=0)
        outcome = await run_episode(agent, task, at, "scripted", cfg.seconds)
        turns = gateway.close(name)
    faults = broken(turns, engine.drawn)
    return {
        "client": name,
        "version": version,
        "done": outcome.reward == 1.0,
        "error": told(outcome),
        **dataclasses.asdict(account(turns)),
        "broken": faults,
        "seconds": round(time.monotonic() - began, 2),
    }


def told(outcome: Outcome) -> str:
    """Why a client did not do its task; "" where it did."""
    return outcome.error or ("" if outcome.reward else "the answer is not what the drawer holds")


def program(client: Client, name: str, folder: Path) -> ProgramConfig:
    """`configs/agent/NAME.yaml`, with what was installed in its PATH and in its sandbox."""
    read = load(ProgramConfig, merged(Path(CONFIGS) / "agent" / f"{name}.yaml"))
    path = f"{folder / 'bin'}:{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    sandbox = dataclasses.replace(read.sandbox, show=(*read.sandbox.show, str(folder.resolve())))
    argv = None if read.command is None else (*read.command, *client.arguments)
    return dataclasses.replace(read, command=argv, env={**read.env, "PATH": path}, sandbox=sandbox)


def merged(file: Path) -> dict[str, Any]:
    """A configuration over the one that all of its folder start from."""
    own = dict(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
    own.pop("defaults")
    base = OmegaConf.load(file.with_name("base.yaml"))
    return OmegaConf.to_container(OmegaConf.merge(base, own))  # type: ignore[return-value]


def install(client: Client, folder: Path) -> str:
    """The version of a client in `folder`, installed unless it is there. Raises UserError."""
    stamp = folder / "version"
    if not stamp.exists():
        print(f"{client.package}: installing into {folder}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        if client.npm is not None:
            ran("npm", "install", "--silent", "--no-fund", "--no-audit", client.npm, cwd=folder)
            listed = ran("npm", "ls", "--depth=0", "--parseable", "--long", cwd=folder)
            version = listed.splitlines()[-1].rpartition("@")[2]
        else:
            ran(sys.executable, "-m", "venv", ".", cwd=folder)
            pip = ("bin/python", "-m", "pip", "--disable-pip-version-check")
            ran(*pip, "install", "--quiet", *client.pip, cwd=folder)
            listed = ran(*pip, "show", client.pip[0].partition("[")[0], cwd=folder)
            version = listed.partition("Version: ")[2].partition("\n")[0]
        stamp.write_text(version)
    return stamp.read_text().strip()


def ran(*argv: str, cwd: Path) -> str:
    """What a program printed. Raises UserError with its last words where it failed."""
    try:
        done = subprocess.run(
            argv, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise UserError(f"{' '.join(argv)}: {' '.join(said)}")
    return done.stdout


def written(value: Any) -> str:
    """A cell: names, or counts by name, in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of the accounts, and why branches were begun and tokens left out."""
    table = Table(*SHOWN)
    for row in rows:
        table.add_row(*(written(row[name]) for name in SHOWN))
    console = Console(stderr=True, width=120)
    console.print(table)
    for row in rows:
        for fault in (*row["broken"], *row["error"].splitlines()[-1:]):
            console.print(f"{row['client']}: {fault}", markup=False)


if __name__ == "__main__":
    main()
