"""Processes of a benchmark answer when asked, say why they died, and leave nothing behind."""

import sys
import time
from pathlib import Path

import pytest

from experiments.bench.children import Child
from forge_jax.config import UserError


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


def test_a_child_answers_when_it_is_asked(tmp_path: Path) -> None:
    echo = python("for line in __import__('sys').stdin: print(line, flush=True, end='')")
    with Child("echo", {"job": 1}, tmp_path / "log", echo) as child:
        assert child.ask() == {"job": 1}


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("import sys; sys.exit('out of ideas')", RuntimeError, "tree ended with 1: out of ideas"),
        ("import os; os.kill(os.getpid(), 9)", RuntimeError, "tree was ended by SIGKILL"),
        (
            "import sys; print('error: model=3 is bad', file=sys.stderr); sys.exit(2)",
            UserError,
            "^tree: model=3 is bad$",
        ),
    ],
)
def test_a_child_that_dies_says_why(
    program: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(kind, match=message),
        Child("tree", {}, tmp_path / "log", python(program)) as child,
    ):
        child.ask()


def gone(pid: int) -> bool:
    """True once a process has ended, or after some seconds False."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_an_interrupt_ends_a_busy_child_and_what_it_started(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, time; print([os.getpid(), subprocess.Popen(['sleep', '60']).pid],"
        " flush=True); time.sleep(60)"
    )
    pids: list[int] = []

    def interrupted() -> None:
        with Child("busy", {}, tmp_path / "log", python(program)) as child:
            pids.extend(child.ask())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
