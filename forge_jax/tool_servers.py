"""Configurations of MCP servers that a white-box agent has its tools from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_jax.loading import check
from forge_jax.programs import PLACE

PLACES = ("workdir",)  # what the texts of a server may name in braces


@dataclass(frozen=True, kw_only=True)
class ToolServer:
    """One MCP server: a command, started for every episode, or a URL of streamable HTTP.

    `command` and the values of `env` may name {workdir}, the folder of the episode, in which the
    command also runs.
    """

    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # beside PATH, HOME and the like
    url: str | None = None
    tools: tuple[str, ...] | None = None  # that are offered to the model; null: all
    start_seconds: float = 30.0  # until it has told its tools
    call_seconds: float = 30.0  # of one call; a tool that takes longer is at fault

    def __post_init__(self) -> None:
        check(
            (self.command is None) != (self.url is None),
            f"command={self.command} and url={self.url}: give one of them",
        )
        check(self.command is None or bool(self.command), "command=[] must name a program")
        check(
            self.url is None or self.url.startswith(("http://", "https://")),
            f"url={self.url!r} must begin with http:// or https://",
        )
        check(self.url is None or not self.env, f"env goes with a command, not with url={self.url}")
        for name in ("start_seconds", "call_seconds"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")
        texts = {f"command[{i}]": text for i, text in enumerate(self.command or ())}
        for name, value in self.env.items():
            check(isinstance(value, str), f"env.{name}={value!r} must be a text")
            texts[f"env.{name}"] = value
        for where, text in texts.items():
            for name in PLACE.findall(text):
                check(name in PLACES, f"{where}: {{{name}}} is none of {', '.join(PLACES)}")


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """A white-box agent that works at a task's folder with the tools of MCP servers."""

    servers: tuple[ToolServer, ...]
    template: str | None = None  # a folder that is copied into every episode's, before its task
    max_turns: int = 16  # replies of the model, the answer included
    max_tokens: int = 1024  # of one reply

    def __post_init__(self) -> None:
        check(bool(self.servers), "servers=[] must name at least one")
        for name in ("max_turns", "max_tokens"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
