"""Black-box agents: programs nobody here wrote, one run of them an episode.

A task's workspace flows in, one `Outcome` flows out, whatever the program does. It finds the
gateway in its environment, works in a folder of its own between walls, and is dead, with all that
it started, before its work is scored outside. What the world does wrong is an EnvironmentFault;
what the program does wrong is its outcome.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from openai import AsyncOpenAI

from forge_jax.agents import black_box_folder as folders
from forge_jax.agents.black_box_text import Facts, environment_of, facts_of, files_of, filled
from forge_jax.agents.faults import environment
from forge_jax.agents.limits import LIMITS
from forge_jax.agents.process import Ended, How, Launch, LocalProcesses, Processes
from forge_jax.agents.process_forks import ForkedProcesses
from forge_jax.agents.protocol import Workspace
from forge_jax.agents.sandbox import Sandbox, relay_port, sandbox_of
from forge_jax.agents.verifiers import Verifiers
from forge_jax.config import UserError
from forge_jax.programs import ProgramConfig
from forge_jax.types import Outcome, Status, Task

CALL = Path(__file__).parent / "process_call.py"
LAST_CHARACTERS = 2000  # of what a failed program printed that are told as its error


@dataclass(frozen=True, kw_only=True)
class BlackBox:
    """Runs the program of `cfg` once for every task."""

    cfg: ProgramConfig
    start: Callable[[Task], Workspace]
    processes: Processes
    sandbox: Sandbox
    verifiers: Verifiers = field(default_factory=Verifiers)

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        url = str(client.base_url)
        gateway = gateway_of(url)
        with folders.episode_folder(self.processes.folder(gateway)) as folder:
            with environment("setup"):
                world = self.start(task)
                prompt = world.prompt
                await asyncio.to_thread(world.setup, folder / "work")
            facts = facts_of(inside(url, self.sandbox), client.api_key, model, prompt, folder)
            folders.write(folder, files_of(self.cfg, facts))
            launch = launch_of(self.cfg, self.sandbox, facts, folder, gateway)
            ended = await self.processes.run(launch)
            failed = failure(ended, self.cfg)
            if failed is not None:
                return failed
            reader = folders.Reader(folder / "work")
            limit = LIMITS.get().verify
            reward = await self.verifiers.call(world.score, reader, ended.stdout, seconds=limit)
            return Outcome(status=Status.COMPLETED, reward=reward, metrics=metrics(ended))


def black_box(cfg: ProgramConfig, start: Callable[[Task], Workspace]) -> BlackBox:
    """The agent that `cfg` describes, on this machine.

    Raises UserError where its program is not in PATH or its sandbox does not work here.
    """
    if cfg.command is not None:
        path = cfg.env.get("PATH") or os.environ.get("PATH")
        if "{" not in cfg.command[0] and shutil.which(cfg.command[0], path=path) is None:
            raise UserError(f"agent.command[0]={cfg.command[0]!r} is not a program in PATH")
    sandbox = sandbox_of(cfg.sandbox)
    fresh = cfg.begin == "fresh"
    return BlackBox(
        cfg=cfg,
        start=start,
        processes=LocalProcesses(cfg.places) if fresh else ForkedProcesses(cfg, sandbox),
        sandbox=sandbox,
    )


def gateway_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def inside(url: str, sandbox: Sandbox) -> str:
    """`url` as a program in `sandbox` reaches it: through the relay on its loopback, if any.

    Raises UserError where the relay would make a certificate false.
    """
    if not sandbox.relays:
        return url
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise UserError(f"url={url}: agent.sandbox.network=gateway needs http; or take host")
    port = relay_port(gateway_of(url)[1])
    return urlunsplit(parts._replace(netloc=f"127.0.0.1:{port}"))


def launch_of(
    cfg: ProgramConfig, sandbox: Sandbox, facts: Facts, folder: Path, gateway: tuple[str, int]
) -> Launch:
    """What to run for one episode."""
    if cfg.function is not None:
        places = [os.path.abspath(place) for place in sys.path]
        argv: tuple[str, ...] = (sys.executable, str(CALL), cfg.function, json.dumps(places))
        stdin = facts["prompt"]
    else:
        argv = tuple(filled(text, facts) for text in cfg.command or ())
        stdin = filled(cfg.stdin, facts)
    return Launch(
        argv=argv,
        env=environment_of(cfg, facts, os.environ),
        stdin=stdin,
        folder=str(folder),
        workdir=facts["workdir"],
        gateway=gateway,
        sandbox=sandbox,
        limits=cfg.limits,
    )


def failure(ended: Ended, cfg: ProgramConfig) -> Outcome | None:
    """The outcome of a program that is not to be scored; None where it is."""
    if ended.how is How.EXITED and (ended.status == 0 or cfg.nonzero == "scored"):
        return None
    status = Status.TIMED_OUT if ended.how is How.TIMED_OUT else Status.AGENT_FAILED
    last = (ended.stderr.strip() or ended.stdout.strip())[-LAST_CHARACTERS:]
    error = reason(ended, cfg) + (f": {last}" if last else "")
    return Outcome(status=status, error=error, metrics=metrics(ended))


def reason(ended: Ended, cfg: ProgramConfig) -> str:
    """Why a program failed, in a few words."""
    match ended.how:
        case How.NOT_STARTED:
            return f"it did not start: {ended.error}"
        case How.TIMED_OUT:
            return f"no end after {cfg.limits.seconds} s"
        case How.TOO_MANY_PROCESSES:
            return f"it had more than {cfg.limits.processes} processes"
    assert ended.status is not None
    if ended.status >= 0:
        return f"exit status {ended.status}"
    return f"killed by {signal.Signals(-ended.status).name}"


def metrics(ended: Ended) -> dict[str, float]:
    """What a program used, as an outcome tells it."""
    return {
        "seconds": ended.seconds,
        "cpu_seconds": ended.cpu_seconds,
        "peak_bytes": float(ended.peak_bytes),
        "output_bytes": float(ended.stdout_bytes + ended.stderr_bytes),
    }
