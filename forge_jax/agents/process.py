"""Runs the processes of one episode, and says once how they ended.

A `Launch` flows in, an `Ended` flows out; both are plain data, so that whoever runs them may be on
another machine that shares the episode's folder.

Invariant: when `run` is over, by whatever way, every process of the episode is dead.
"""

import asyncio
import contextlib
import enum
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge_jax.agents.faults import EnvironmentFault
from forge_jax.agents.sandbox import Sandbox, numbers, relay_port
from forge_jax.programs import LimitConfig

BARE = (sys.executable, "-I", "-S")  # starts in milliseconds, and reads no settings of the agent's
HERE = Path(__file__).parent


class How(enum.StrEnum):
    """Why the processes of an episode ended."""

    EXITED = "exited"
    NOT_STARTED = "not_started"  # there is no such program, or it may not be run
    TIMED_OUT = "timed_out"
    TOO_MANY_PROCESSES = "too_many_processes"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one episode runs."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # all of it
    stdin: str
    folder: str  # of the episode, the only one that it can write
    workdir: str  # below it
    gateway: tuple[str, int]  # host and port that a sandbox without network can reach
    sandbox: Sandbox
    limits: LimitConfig


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it ended and what it used."""

    how: How
    status: int | None  # exit status, minus the signal that killed it; None: it was ended
    error: str  # why it did not start
    stdout: str  # the last part of it
    stderr: str
    stdout_bytes: int  # all of it
    stderr_bytes: int
    seconds: float  # of wall time
    cpu_seconds: float  # of it and all that it started and waited for
    peak_bytes: int  # memory of its biggest process


class Processes(Protocol):
    """Where episodes' processes run: this machine, or a cluster."""

    def folder(self, gateway: tuple[str, int]) -> Path | None:
        """Where the folders of episodes that reach `gateway` have to be; None: anywhere."""
        ...

    async def run(self, launch: Launch) -> Ended:
        """Waits for a place, then runs `launch` to its end.

        Raises EnvironmentFault where the walls around it do not hold. If the run is cancelled,
        its processes are ended first.
        """
        ...


class LocalProcesses:
    """On this machine, so many episodes at once; each has a supervisor process of its own."""

    def __init__(self, places: int):
        self._places = asyncio.Semaphore(places)

    def folder(self, gateway: tuple[str, int]) -> None:
        return None

    async def run(self, launch: Launch) -> Ended:
        async with self._places:
            supervisor = await asyncio.create_subprocess_exec(
                *BARE,
                str(HERE / "process_supervisor.py"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # an interrupt of the terminal is the trainer's to handle
            )
            try:
                return await watched(supervisor, launch)
            finally:
                await over(supervisor)


async def watched(supervisor: asyncio.subprocess.Process, launch: Launch) -> Ended:
    """Tells `supervisor` what to run, and what it reports. Raises EnvironmentFault."""
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    assert supervisor.stderr is not None
    with contextlib.suppress(ConnectionError):  # it died: its report is missing, too
        supervisor.stdin.write(json.dumps(order(launch)).encode() + b"\n")
        await supervisor.stdin.drain()
    report, complaint = await asyncio.gather(supervisor.stdout.read(), supervisor.stderr.read())
    if not report.endswith(b"\n"):
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise EnvironmentFault(f"the supervisor of an episode ended without a report: {last}")
    return read(json.loads(report))


async def over(supervisor: asyncio.subprocess.Process) -> None:
    """Ends the episode if it still runs, and waits until nothing of it is left."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    ending = asyncio.ensure_future(supervisor.wait())
    await asyncio.wait({ending})


def order(launch: Launch) -> dict[str, Any]:
    """What a supervisor is told."""
    box, limits = launch.sandbox, launch.limits
    return {
        "around": box.around(launch.folder),
        "inside": [*BARE, str(HERE / "process_inside.py")],
        "env": dict(launch.env),
        "stdin": launch.stdin,
        "seconds": limits.seconds,
        "grace": limits.grace,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes + box.processes,
        "gateway": launch.gateway,
        "within": {
            "argv": launch.argv,
            "workdir": launch.workdir,
            "limits": resource_limits(limits),
            "walls": box.walls(launch.folder),
            "numbers": numbers(limits.processes),
            "port": relay_port(launch.gateway[1]) if box.relays else None,
            "drop": box.kind == "namespaces",
        },
    }


def resource_limits(limits: LimitConfig) -> dict[str, int]:
    """By their names in the module `resource`."""
    named = {
        "RLIMIT_CPU": limits.cpu_seconds,
        # Not the address space: runtimes reserve much more of it than they ever use.
        "RLIMIT_DATA": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
    }
    return {name: value for name, value in named.items() if value is not None}


def read(report: Mapping[str, Any]) -> Ended:
    """A supervisor's report as a record. Raises EnvironmentFault where it tells of one."""
    if not report["dead"]:
        raise EnvironmentFault("processes of an episode did not die")
    if report["how"] not in set(How):
        raise EnvironmentFault(f"the sandbox of an episode broke: {report['error'] or 'killed'}")
    return Ended(
        how=How(report["how"]),
        status=report["status"],
        error=report["error"],
        stdout=report["outputs"][0],
        stderr=report["outputs"][1],
        stdout_bytes=report["totals"][0],
        stderr_bytes=report["totals"][1],
        seconds=report["seconds"],
        cpu_seconds=report["cpu_seconds"],
        peak_bytes=report["peak_bytes"],
    )
