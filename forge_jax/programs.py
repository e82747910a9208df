"""Configurations of black-box agents: any program that calls a model over HTTP.

Texts may name what an episode is about in braces, {base_url} and the like; a name that does not
exist is refused when the configuration is read, not when an episode starts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from forge_jax.loading import check

# {name} alone: braces of JSON, of other templates ({{name}}) and of code stay as they are.
PLACE = re.compile(r"(?<![{$])\{([a-z_]+)\}(?!\})")
PLACES = ("base_url", "root_url", "api_key", "model", "prompt", "workdir", "home")
SANDBOXES = ("auto", "bwrap", "namespaces", "none")
NETWORKS = ("gateway", "host")
NONZERO = ("failed", "scored")
BEGINNINGS = ("fresh", "forked")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """What one episode's processes may use; null is without a limit."""

    seconds: float | None = 600.0  # of wall time, from its start to its end
    grace: float = 2.0  # seconds between SIGTERM and SIGKILL
    output_bytes: int = 1 << 18  # kept of each of its two outputs, the last ones
    cpu_seconds: int | None = None  # of each process
    memory_bytes: int | None = None  # private memory of each process
    file_bytes: int | None = 1 << 30  # of each file it writes
    processes: int = 256  # at once, threads not counted

    def __post_init__(self) -> None:
        check(self.seconds is None or self.seconds > 0, f"seconds={self.seconds} must be > 0")
        # Whoever cancels an episode waits so long for it to end.
        check(0 <= self.grace <= 4, f"grace={self.grace} must be from 0 to 4")
        check(self.output_bytes >= 1, f"output_bytes={self.output_bytes} must be at least 1")
        check(self.processes >= 1, f"processes={self.processes} must be at least 1")
        for name in ("cpu_seconds", "memory_bytes", "file_bytes"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name}={value} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """What an episode can see and reach."""

    kind: str = "auto"  # auto: the best that works on this machine
    network: str = "gateway"  # what a sandboxed episode can reach; host: whatever the host can
    hide: tuple[str, ...] = (  # of a read-only file system; ~ is the home folder of the trainer
        "~/.ssh", "~/.aws", "~/.netrc", "~/.config", "~/.cache/huggingface/token", "~/.docker",
    )  # fmt: skip
    show: tuple[str, ...] = ()  # of /tmp, of which an episode has its own

    def __post_init__(self) -> None:
        check(self.kind in SANDBOXES, f"kind={self.kind!r} must be one of {SANDBOXES}")
        check(self.network in NETWORKS, f"network={self.network!r} must be one of {NETWORKS}")
        for path in self.show:
            check(path.startswith("/"), f"show={path!r} must be an absolute path")


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """One black-box agent: a command or a function, one run of it an episode.

    `command`, `stdin`, and the values of `env` and `files` are templates; `files` go by their
    paths in the episode's folder, which has `home` and `work`, where the program runs.
    """

    command: tuple[str, ...] | None = None  # its arguments; the first one is looked up in PATH
    function: str | None = None  # "module:function", called with the prompt in a process of its own
    begin: str = "fresh"  # forked: of a process that has imported the function; see process_forks
    stdin: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)  # null takes a variable away
    inherit: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")  # variables of the trainer
    files: Mapping[str, str] = field(default_factory=dict)
    nonzero: str = "failed"  # what an exit status but 0 is: failed | scored, like 0
    places: int = 16  # episodes whose processes run at once
    limits: LimitConfig = field(default_factory=LimitConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        check(
            (self.command is None) != (self.function is None),
            f"command={self.command} and function={self.function}: give one of them",
        )
        check(self.command is None or bool(self.command), "command=[] must name a program")
        check(
            self.function is None or FUNCTION.fullmatch(self.function) is not None,
            f"function={self.function!r} must be module:function",
        )
        check(
            self.function is None or not self.stdin,
            f"stdin={self.stdin!r} goes with a command: a function is called with the prompt",
        )
        check(self.begin in BEGINNINGS, f"begin={self.begin!r} must be one of {BEGINNINGS}")
        check(
            self.begin == "fresh" or self.function is not None,
            f"begin={self.begin} goes with a function: a command is a program to start",
        )
        check(self.nonzero in NONZERO, f"nonzero={self.nonzero!r} must be one of {NONZERO}")
        check(self.places >= 1, f"places={self.places} must be at least 1")
        _check_files(self.files)
        _check_places(self)


def _check_files(files: Mapping[str, str]) -> None:
    for path in files:
        parts = PurePosixPath(path).parts
        inside = len(parts) > 1 and parts[0] in ("home", "work") and ".." not in parts
        check(inside, f"files: {path!r} must be below home/ or work/")


def _check_places(cfg: ProgramConfig) -> None:
    texts = {f"command[{i}]": text for i, text in enumerate(cfg.command or ())}
    texts["stdin"] = cfg.stdin
    for key, values in (("env", cfg.env), ("files", cfg.files)):
        for name, value in values.items():
            check(
                isinstance(value, str) or (key == "env" and value is None),
                f"{key}.{name}={value!r} must be a text",
            )
            texts[f"{key}.{name}"] = value or ""
    named = {(where, name) for where, text in texts.items() for name in PLACE.findall(text)}
    for where, name in sorted(named):
        check(name in PLACES, f"{where}: {{{name}}} is none of {', '.join(PLACES)}")
    told = cfg.function is not None or "prompt" in {name for _, name in named}
    check(told, "{prompt} is in none of command, stdin, env and files: it would never be told")
