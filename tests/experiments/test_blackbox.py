"""An agent that nobody here wrote is trained: its run ends on Ctrl-C, resumes, and adds up."""

import json
import signal
from pathlib import Path

import pytest
from train_command import TINY, finish, rows, start, wait_for

pytest.importorskip("agents", reason="the agent is one of openai-agents")
SMALL = ("+experiment=blackbox", *TINY[1:], "warm.demonstrations=16", "eval.episodes=4")


def below(pid: int) -> set[int]:
    """All processes that `pid` started, directly or not."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | below(child)
    return found


@pytest.mark.slow
def test_a_program_is_trained_through_an_interrupt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(*SMALL, "steps=1000", f"hydra.run.dir={folder}")
    wait_for(run, lambda: len(rows(folder)) >= 1)
    started = below(run.pid)
    assert len(started) >= 3  # the process that others are forked from, and those around it
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 130, err
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]

    steps = len(rows(folder)) + 2
    summary = finish(start(f"resume={folder}", f"steps={steps}"))
    assert summary == json.loads((folder / "summary.json").read_text())
    history = rows(folder)
    assert [row["step"] for row in history] == list(range(1, steps + 1))
    assert summary["episodes"] == sum(row["episodes"] for row in history) == steps * 2 * 4
    for row in history:
        assert not row["failed"], row["error"]
        left = sum(value for name, value in row.items() if name.startswith("tokens_left_out_"))
        assert row["tokens_sampled"] == row["tokens_trained"] + left
        # The client keeps its history: every call goes on from the one before.
        assert (row["fork_rate"], row["forks"]) == (0, {})
        assert row["splice_rate"] in (1, None)  # None: no call had a reply before it
        assert row["agent_cpu_seconds"] > 0
