"""Walls around one episode: what it can see, write, signal and reach.

A `SandboxConfig` flows in, a `Sandbox` that works on this machine flows out; it was tried, not
guessed. In one, the file system is read-only but for the episode's own folder, /tmp is its own,
no process of another episode or of the trainer is seen, no capability is left, and the network is a
loopback of its own whose one port leads to the gateway: the socket that listens there was made
inside and is served by the supervisor outside.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_jax.config import UserError
from forge_jax.programs import SandboxConfig

USER = "1000"  # inside: some agents refuse to be root
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
SOCKETS = "/run"  # of the host's services
INSIDE = Path(__file__).parent / "process_inside.py"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Walls of one kind; every episode gets its own."""

    kind: str  # bwrap | namespaces | none
    network: str = "gateway"
    hide: tuple[str, ...] = ()  # absolute paths
    show: tuple[str, ...] = ()

    @property
    def relays(self) -> bool:
        """Whether the gateway is reached through a relay, because nothing else can be."""
        return self.kind != "none" and self.network == "gateway"

    @property
    def processes(self) -> int:
        """How many processes of an episode are ours."""
        return {"none": 1, "namespaces": 2, "bwrap": 3}[self.kind]

    @property
    def empty(self) -> tuple[str, ...]:
        """What is there but empty."""
        hidden = tuple(path for path in self.hide if os.path.exists(path))
        return (*PRIVATE, *((SOCKETS,) if self.relays else ()), *hidden)

    def around(self, folder: str) -> list[str]:
        """The command line that runs another one inside, up to that one."""
        if self.kind == "namespaces":
            return self._unshare()
        return self._bwrap(folder) if self.kind == "bwrap" else []

    def walls(self, folder: str) -> dict[str, Any] | None:
        """What the first process inside still has to build."""
        if self.kind != "namespaces":
            return None
        return {"folder": folder, "show": self.show, "empty": self.empty}

    def _unshare(self) -> list[str]:
        alone = ["--net"] if self.relays else []
        # Capabilities are kept for what has to be mounted, and dropped before the agent starts.
        user = ["--user", f"--map-user={USER}", f"--map-group={USER}", "--keep-caps"]
        spaces = ["--mount", "--pid", "--ipc", "--uts", *alone]
        return [_found("unshare"), *user, *spaces, "--fork", "--kill-child"]

    def _bwrap(self, folder: str) -> list[str]:
        alone = ["--unshare-net"] if self.relays else []
        made = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for path in self.empty:
            if os.path.isdir(path):
                made += ["--tmpfs", path]
            elif os.path.exists(path):
                made += ["--ro-bind", "/dev/null", path]
        for path in self.show:
            made += ["--ro-bind", path, path]
        user = ["--unshare-user", "--uid", USER, "--gid", USER]
        spaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", *alone]
        made += ["--bind", folder, folder]
        return [_found("bwrap"), "--die-with-parent", *user, *spaces, *made, "--"]


def relay_port(port: int) -> int:
    """Where the gateway's `port` is found inside; not everyone may listen at a low one."""
    return port if port >= 1024 else port + 40000


def numbers(processes: int) -> int:
    """Process numbers for so many processes and their threads; the kernel keeps 300."""
    return 300 + 32 * processes


def _found(program: str) -> str:
    return shutil.which(program) or program


def sandbox_of(cfg: SandboxConfig) -> Sandbox:
    """Walls of the kind that is asked for, or of the best kind that works here.

    Raises UserError where a kind that is named does not work on this machine.
    """
    paths = tuple(os.path.expanduser(path) for path in cfg.hide)
    kinds = ("bwrap", "namespaces", "none") if cfg.kind == "auto" else (cfg.kind,)
    problems: list[str] = []
    for kind in kinds:
        box = Sandbox(kind=kind, network=cfg.network, hide=paths, show=cfg.show)
        problem = problem_of(box)
        if problem is None:
            if problems:
                LOG.warning("agent.sandbox.kind=%s: %s", kind, "; ".join(problems))
            return box
        problems.append(f"{kind} does not work here ({problem})")
    raise UserError(f"agent.sandbox.kind={cfg.kind}: {'; '.join(problems)}")


@functools.lru_cache
def problem_of(box: Sandbox) -> str | None:
    """Why such walls do not work on this machine; None where a process runs inside them."""
    if box.kind == "none":
        return None
    if sys.platform != "linux":
        return "it is not Linux"
    program = "unshare" if box.kind == "namespaces" else box.kind
    if shutil.which(program) is None:
        return f"no {program} in PATH"
    with tempfile.TemporaryDirectory() as folder:
        return _tried(box, folder)


def _tried(box: Sandbox, folder: str) -> str | None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        within = {
            "argv": ["true"],
            "workdir": folder,
            "limits": {},
            "walls": box.walls(folder),
            "numbers": numbers(1),
            "port": 1 << 15 if box.relays else None,
            "drop": box.kind == "namespaces",
        }
        ours.sendall(json.dumps(within).encode() + b"\n")
        command = [*box.around(folder), sys.executable, "-I", "-S", str(INSIDE)]
        ran = subprocess.run(
            [*command, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        ours.setblocking(False)
        told = b""
        with contextlib.suppress(BlockingIOError):
            while piece := ours.recv(1 << 16):
                told += piece
    if not told.strip():
        return ran.stderr.strip() or f"exit status {ran.returncode}"
    said = json.loads(told)
    return None if said["how"] == "exited" else said["error"]
