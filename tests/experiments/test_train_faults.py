"""The training command, stopped by a mistake, a fault or an interrupt: its words and its status."""

import json
import signal
from pathlib import Path

import pytest
from refusals import refused
from train_command import SYNCHRONOUS, TINY, rows, start, wait_for

from experiments.eval import main as evaluate
from experiments.train import main as train


def test_a_model_elsewhere_is_cut_by_nobody_here() -> None:
    overrides = ("model=any", "task=hop", "url=http://127.0.0.1:9/v1", "mesh.tensor=2")
    assert "mesh goes with a model served here, not with url=" in refused(evaluate, *overrides)


@pytest.mark.parametrize("group", ["agent", "task", "mesh"])
def test_no_file_of_a_group_is_refused(group: str) -> None:
    assert f"{group}=null: leave {group} out, or name a file of" in refused(train, f"{group}=null")


def test_levels_that_a_family_lacks_are_refused(tmp_path: Path) -> None:
    elsewhere = ("model=any", "task=qa", "level=3", "url=http://127.0.0.1:9/v1")
    assert "level=3 of task='qa' must be from 0 to 2" in refused(evaluate, *elsewhere)
    mixed = ("task=mixed", "+domains.hop.curriculum.levels=[0,1]", f"hydra.run.dir={tmp_path}/run")
    assert "level=1 of task='hop' must be from 0 to 0" in refused(train, *mixed)


def test_an_endpoint_that_does_not_answer_is_no_score() -> None:
    overrides = ("model=any", "task=hop", "episodes=2", "url=http://127.0.0.1:9/v1")
    run = start(*overrides, python=("-m", "experiments.eval"))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (2, "")
    assert "url=http://127.0.0.1:9/v1: every episode failed" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("unknown=1", "unknown"),
        ("+sched.unknown=1", "sched.unknown"),
        ("sched.group=1", "group=1"),
        ("model=nowhere", "model='nowhere'"),
        ("resume=/nowhere", "resume=/nowhere"),
        ("pool=memory://", "pool=memory:// would not outlive"),
        ("pool=bogus://x", "pool='bogus://x' cannot be opened"),
        ("rollout.context=100000", "rollout.context=100000"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(train, override, f"hydra.run.dir={tmp_path}/run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number"), [("warm start", signal.SIGINT), ("RL", signal.SIGTERM)]
)
def test_an_interrupt_says_how_to_go_on(tmp_path: Path, phase: str, number: int) -> None:
    folder = tmp_path / "run"
    endless = ("steps=1000",) if phase == "RL" else ("warm.steps=1000000",)
    run = start(*TINY, *endless, f"hydra.run.dir={folder}")
    wait_for(run, lambda: bool(rows(folder)) if phase == "RL" else (folder / "warm").exists())
    run.send_signal(number)
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (130, "")
    assert err.endswith(f"interrupted\nto go on: python -m experiments.train resume={folder}\n")


BREAKING = """
from forge_jax.rl import warm
from experiments.train import main

def update(*_):
    raise RuntimeError("the device is gone")

warm.update = update
main()
"""


def test_a_fault_is_a_trace_and_status_1(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(*TINY, f"hydra.run.dir={folder}", python=("-c", BREAKING))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (1, "")
    assert "Traceback" in err
    assert err.splitlines()[-2:] == [
        "fault: RuntimeError: the device is gone",
        f"to go on: python -m experiments.train resume={folder}",
    ]


def test_the_gate_keeps_rl_from_starting_at_chance(tmp_path: Path) -> None:
    overrides = (*SYNCHRONOUS, "warm.steps=1", "warm.gate=0.9", f"hydra.run.dir={tmp_path}/run")
    _, err = (run := start(*overrides)).communicate(timeout=300)
    assert run.returncode == 2
    assert "warm.gate=0.9" in err


def test_a_multirun_is_one_run_folder_a_job(tmp_path: Path) -> None:
    overrides = (*SYNCHRONOUS, "steps=1", "warm.steps=2", "eval.episodes=2")
    run = start("-m", "seed=0,1", *overrides, f"hydra.sweep.dir={tmp_path}/sweep")
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    summaries = [json.loads(line) for line in out.splitlines()]
    folders = {Path(s["run_dir"]) for s in summaries}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "sweep"}
    for number, summary in enumerate(summaries):
        folder = Path(summary["run_dir"])
        assert json.loads((folder / "summary.json").read_text()) == summary
        assert f"seed: {number}" in (folder / "config.yaml").read_text()
