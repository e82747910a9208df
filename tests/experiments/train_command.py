"""The training command in a process of its own, as tests start, watch and kill it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TINY = (
    "steps=5",
    "warm.steps=40",
    "warm.batch=32",
    "warm.gate=0",
    "eval.episodes=8",
    "sched.group=4",
    "sched.batch=2",
    "sched.in_flight=4",
    "sched.window=2",
    "rollout.slots=16",
    "checkpoint_every=1",
)
SYNCHRONOUS = (*TINY, "sched.synchronous=true", "sched.in_flight=2", "sched.window=0")

# As at a user's: one device. The programs of all runs are in one compilation cache.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
# Tests that were begun in the background ignore Ctrl-C, and a run they start would as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(
    *overrides: str, python: Sequence[str] = ("-m", "experiments.train")
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, *overrides],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> dict:
    try:
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def rows(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(run: subprocess.Popen[str], event: Callable[[], bool]) -> None:
    while not event():
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)


def kill_after(run: subprocess.Popen[str], folder: Path, step: int, delay: float) -> None:
    """SIGKILL `delay` seconds after the row of `step` was written."""
    wait_for(run, lambda: len(rows(folder)) >= step)
    time.sleep(delay)
    run.send_signal(signal.SIGKILL)
    run.communicate()
