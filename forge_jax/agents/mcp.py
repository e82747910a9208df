"""Tools of MCP servers, as an `Environment` of a white-box agent.

Configured servers and a task's folder flow in; tools in OpenAI's shape and the texts of their
results flow out. Invariant: an episode has a connection, and of a command a process and a folder,
of its own, and these end with it, whatever happens. What a server says of a call (a wrong
argument, a missing file) is the model's to read; a server that dies, hangs or speaks no MCP is an
EnvironmentFault.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as McpTool
from openai import AsyncOpenAI

from forge_jax.agents import black_box_folder as folders
from forge_jax.agents.faults import BadCall, EnvironmentFault, environment
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Environment, Message, Tool, Workspace
from forge_jax.agents.verifiers import Verifiers
from forge_jax.agents.white_box import ToolLoop
from forge_jax.config import UserError
from forge_jax.programs import PLACE
from forge_jax.tool_servers import ToolsConfig, ToolServer
from forge_jax.types import Outcome, Task

NAME = re.compile(r"[^A-Za-z0-9_-]")  # what the name of a function must not have
LONGEST = 64  # characters of such a name
LAST_BYTES = 2000  # of what a server printed that are told with its fault
WHOLE = Manager()  # of contexts that nothing is taken from
TOLD = (INVALID_PARAMS, METHOD_NOT_FOUND)  # errors that are about the call


@dataclass(frozen=True)
class Offered:
    """A tool and the server that it is of."""

    client: Client
    tool: McpTool
    seconds: float  # of one call

    @property
    def name(self) -> str:
        """What the model calls it."""
        return NAME.sub("_", self.tool.name)[:LONGEST]

    @property
    def shape(self) -> Tool:
        """As OpenAI has it; the schema is the server's."""
        function = {
            "name": self.name,
            "description": self.tool.description or self.tool.title or "",
            "parameters": self.tool.input_schema,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class McpWorld:
    """Implements `Environment`: the folder of a task, and tools that work in it."""

    workspace: Workspace
    workdir: Path
    offered: Mapping[str, Offered]  # by name
    verifiers: Verifiers

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.workspace.prompt},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(tool.shape for tool in self.offered.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall where there is no such tool or its server does not take the arguments,
        EnvironmentFault where the server dies or is too slow."""
        if name not in self.offered:
            raise BadCall(f"no tool {name}; there are {', '.join(self.offered)}")
        found = self.offered[name]
        try:
            async with asyncio.timeout(found.seconds):
                result = await found.client.call_tool(found.tool.name, dict(arguments))
        except TimeoutError:
            raise EnvironmentFault(f"tool {name}: no result after {found.seconds} s") from None
        except MCPError as error:
            if error.code in TOLD:
                raise BadCall(f"{name}: {error.message}") from error
            raise EnvironmentFault(f"tool {name}: {error.message}") from error
        return text_of(result)

    async def score(self, answer: str) -> float:
        reader = folders.Reader(self.workdir)
        return await self.verifiers.call(self.workspace.score, reader, answer, seconds=None)


@dataclass(frozen=True, kw_only=True)
class McpAgent:
    """Works at the folder of a task with the tools of MCP servers."""

    cfg: ToolsConfig
    start: Callable[[Task], Workspace]
    verifiers: Verifiers = field(default_factory=Verifiers)
    manager: Manager = field(default_factory=Manager)  # of the context

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        with folders.episode_folder() as folder:
            workdir = folder / "work"
            with environment("setup"):
                workspace = self.start(task)
                await asyncio.to_thread(self._fill, workspace, workdir)
            async with opened(self.cfg, workspace, workdir, self.verifiers) as world:
                # The task groups of a transport would wrap what is raised through them.
                try:
                    return await self._loop(world).run(task, client, model)
                except Exception as error:
                    failure = error
            raise failure

    def _loop(self, world: Environment) -> ToolLoop:
        return ToolLoop(
            start=lambda _: world,
            max_turns=self.cfg.max_turns,
            max_tokens=self.cfg.max_tokens,
            manager=self.manager,
        )

    def _fill(self, workspace: Workspace, workdir: Path) -> None:
        if self.cfg.template is not None:
            shutil.copytree(self.cfg.template, workdir, dirs_exist_ok=True)
        workspace.setup(workdir)


def mcp_agent(
    cfg: ToolsConfig, start: Callable[[Task], Workspace], manager: Manager = WHOLE
) -> McpAgent:
    """The agent that `cfg` describes, with a `manager` of its context. Raises UserError where a
    program or the template is missing on this machine."""
    for number, server in enumerate(cfg.servers):
        if server.command is not None and shutil.which(server.command[0]) is None:
            where = f"tools.servers[{number}].command[0]={server.command[0]!r}"
            raise UserError(f"{where} is not a program in PATH")
    if cfg.template is not None and not Path(cfg.template).is_dir():
        raise UserError(f"tools.template={cfg.template!r} is no folder")
    return McpAgent(cfg=cfg, start=start, manager=manager)


@asynccontextmanager
async def opened(
    cfg: ToolsConfig, workspace: Workspace, workdir: Path, verifiers: Verifiers
) -> AsyncIterator[McpWorld]:
    """The world with its servers up; they are down when the block is left.

    Raises EnvironmentFault where a server does not start, or two offer tools of one name.
    """
    fault: EnvironmentFault | None = None
    async with AsyncExitStack() as stack:
        # Raised here it would leave the task groups of a transport as a group of exceptions.
        try:
            offered = await _offered(cfg, workdir, stack)
        except EnvironmentFault as error:
            fault = error
        else:
            yield McpWorld(workspace, workdir, offered, verifiers)
    if fault is not None:
        raise fault


async def _offered(cfg: ToolsConfig, workdir: Path, stack: AsyncExitStack) -> Mapping[str, Offered]:
    """The tools of all servers by name; servers are up as long as `stack` is."""
    offered: dict[str, Offered] = {}
    for number, server in enumerate(cfg.servers):
        log = stack.enter_context((workdir.parent / f"server-{number}.log").open("w+"))
        try:
            async with asyncio.timeout(server.start_seconds):
                client = await stack.enter_async_context(connection(server, workdir, log))
                found = await tools_of(client, server)
        except Exception as error:
            raise EnvironmentFault(f"server {number}: {_why(error)}{_printed(log)}") from error
        for tool in found:
            one = Offered(client, tool, server.call_seconds)
            if one.name in offered:
                raise EnvironmentFault(f"server {number}: there is a tool {one.name} already")
            offered[one.name] = one
    return offered


def connection(server: ToolServer, workdir: Path, log: IO[str]) -> Client:
    """A client of a server, to be entered; a command starts then, and prints into `log`."""
    if server.url is not None:
        return Client(server.url)
    facts = {"workdir": str(workdir)}

    def filled(text: str) -> str:
        return PLACE.sub(lambda place: facts[place[1]], text)

    program, *arguments = map(filled, server.command or ())
    settings = StdioServerParameters(
        command=program,
        args=arguments,
        env={name: filled(value) for name, value in server.env.items()},
        cwd=workdir,
    )
    return Client(stdio_client(settings, errlog=log))  # type: ignore[arg-type]


async def tools_of(client: Client, server: ToolServer) -> list[McpTool]:
    """All pages of a server's tools, or those that its configuration names.

    Raises ValueError where there is none of a name.
    """
    listed = await client.list_tools()
    found = list(listed.tools)
    while listed.next_cursor is not None:
        listed = await client.list_tools(cursor=listed.next_cursor)
        found += listed.tools
    if server.tools is None:
        return found
    there = {tool.name: tool for tool in found}
    for name in server.tools:
        if name not in there:
            raise ValueError(f"tools: {name!r} is none of {', '.join(sorted(there))}")
    return [there[name] for name in server.tools]


def text_of(result: CallToolResult) -> str:
    """What a result says in text, an error's too; what is no text is named by its kind."""
    parts = []
    for part in result.content:
        if isinstance(part, TextContent):
            parts.append(part.text)
        elif isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
            parts.append(part.resource.text)
        else:
            parts.append(f"[{part.type}]")
    return "\n".join(parts)


def _why(error: BaseException) -> str:
    """The first cause that is no group of others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _printed(log: IO[str]) -> str:
    log.seek(0)
    last = log.read()[-LAST_BYTES:].strip()
    return f"; it printed: {last}" if last else ""
