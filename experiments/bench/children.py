"""The parent's end of the processes of a benchmark.

Commands go in, answers come out. Every process is in a session of its own, so that Ctrl-C
reaches the parent alone, and none outlives the `with` block it is used in.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forge_jax.config import UserError

WORKER = (sys.executable, "-m", "experiments.bench.worker")
GRACE = 5.0  # seconds to end by itself


class Child:
    """A worker that does one piece of its job whenever it is asked to."""

    def __init__(
        self, name: str, job: dict[str, Any], log: Path, command: tuple[str, ...] = WORKER
    ):
        self.name = name
        self._log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                # Several share one device, where there is one.
                env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ,
            )
        self._say(json.dumps(job))

    def ask(self) -> dict[str, Any]:
        """The next piece of the job. Raises UserError or RuntimeError if the process ends."""
        self._say("next")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise failure(self.name, self._process.wait(), self._log)
        return json.loads(answer)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise failure(self.name, self._process.wait(), self._log) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self._process, patient=error is None)


def shell(name: str, command: str, log: Path) -> str:
    """What a shell command prints. Raises UserError if it fails."""
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        printed, _ = process.communicate()
    finally:
        end(process, patient=False)
    if process.returncode != 0:
        ended = failure(name, process.returncode, log)
        raise UserError(f"{name}={command!r}: {ended}")
    return printed


def end(process: subprocess.Popen[str], patient: bool) -> None:
    """Ends a process and whatever it started; a patient parent lets it see its input end."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # it is gone already, with something unread
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE if patient else 0)
    with suppress(ProcessLookupError):  # nothing is left of its session
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(name: str, status: int, log: Path) -> Exception:
    """What became of a process, in one line: the caller's mistake where it says so."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "it said nothing")
    if status == 2 and last.startswith("error: "):
        return UserError(f"{name}: {last.removeprefix('error: ')}")
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}, as happens without memory left"
        return RuntimeError(f"the process of {name} {how}; its output is in {log}")
    return RuntimeError(f"the process of {name} ended with {status}: {last}; see {log}")
