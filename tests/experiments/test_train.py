"""The training command: its files, and that a kill at any moment changes nothing.

Runs are tiny (a few updates of two groups), synchronous where they are compared.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import command
from experiments.train import continued
from forge_jax.config import UserError
from forge_jax.sched.pool import Pool

CONFIGS = Path(command.CONFIGS)
TINY = (
    "steps=5",
    "warm.steps=80",
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
# What may differ between two runs of the same history.
TIMING = ("seconds_collect", "seconds_update", "agent_tool_seconds")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The runs of this file compile the same programs: they share a compilation cache."""
    cache = tmp_path_factory.mktemp("compiled")
    return {
        **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def start(
    environment: dict[str, str],
    *overrides: str,
    python: Sequence[str] = ("-m", "experiments.train"),
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> dict:
    out, err = run.communicate(timeout=300)
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


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """A synchronous run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    summary = finish(start(environment, *SYNCHRONOUS, f"hydra.run.dir={folder}"))
    assert summary == json.loads((folder / "summary.json").read_text())
    return folder


def test_a_run_leaves_the_promised_files(calm: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "curves.png", "summary.json"):
        assert (calm / name).stat().st_size > 0, name
    assert (calm / "checkpoints" / "5").is_dir()
    summary = json.loads((calm / "summary.json").read_text())
    assert [row["step"] for row in rows(calm)] == [1, 2, 3, 4, 5]
    assert summary["steps"] == 5
    assert summary["episodes"] == 5 * 2 * 4
    assert summary["lag_bound"] == 2 + 0 - 1
    assert summary["lag_max"] <= summary["lag_bound"]
    assert summary["tree_token_ratio"] > 1
    assert 0 <= summary["eval_before"] <= 1
    assert Pool.open(str(calm / "pool")).items() == tuple(range(10))


def test_trainer_and_engine_agree_on_log_probs(calm: Path) -> None:
    checked = [row for row in rows(calm) if row["stepped"]]
    assert checked
    for row in checked:
        assert row["logp_gap_calls"] == row["samples"]  # synchronous: no update crosses a call
        assert row["logp_gap_max"] < 1e-4
        assert abs(row["ratio_mean"] - 1) < 1e-4


def test_the_run_folder_is_a_model_that_evaluates_alike(
    calm: Path, environment: dict[str, str]
) -> None:
    overrides = (f"model={calm}", "task=hop", "episodes=8", "rollout.slots=16")
    found = finish(start(environment, *overrides, python=("-m", "experiments.eval")))
    summary = json.loads((calm / "summary.json").read_text())
    assert found["success"] == summary["eval_after"]
    assert found["success_ci"] == summary["eval_after_ci"]
    assert found["mean_turns"] == summary["mean_turns"]


def test_a_model_elsewhere_is_cut_by_nobody_here(environment: dict[str, str]) -> None:
    overrides = ("model=any", "task=hop", "url=http://127.0.0.1:9/v1", "mesh.tensor=2")
    run = start(environment, *overrides, python=("-m", "experiments.eval"))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (2, "")
    assert "mesh goes with a model served here, not with url=" in err.splitlines()[-1]


def test_an_endpoint_that_does_not_answer_is_no_score(environment: dict[str, str]) -> None:
    overrides = ("model=any", "task=hop", "episodes=2", "url=http://127.0.0.1:9/v1")
    run = start(environment, *overrides, python=("-m", "experiments.eval"))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (2, "")
    assert "url=http://127.0.0.1:9/v1: every episode failed" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_synchronous_run_continues_to_the_same_numbers(
    tmp_path: Path, calm: Path, environment: dict[str, str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path / "run"
    run = start(environment, *SYNCHRONOUS, f"hydra.run.dir={folder}")
    kill_after(run, folder, step=int(rng.integers(1, 4)), delay=float(rng.random() * 0.3))
    summary = finish(start(environment, f"resume={folder}"))
    want = json.loads((calm / "summary.json").read_text())
    for timing in ("seconds", "run_dir"):
        summary.pop(timing), want.pop(timing)
    assert summary == want
    for got, expected in zip(rows(folder), rows(calm), strict=True):
        for name in TIMING:
            got.pop(name, None), expected.pop(name, None)
        assert got == expected


@pytest.mark.slow
def test_a_killed_asynchronous_run_consumes_each_item_once(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    run = start(environment, *TINY, f"hydra.run.dir={folder}")
    kill_after(run, folder, step=2, delay=0.1)
    summary = finish(start(environment, f"resume={folder}"))
    history = [number for row in rows(folder) for number in row["items"]]
    assert len(history) == len(set(history)) == 10
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]
    assert summary["lag_max"] <= summary["lag_bound"] == 4 + 2 - 1
    assert summary["episodes"] == 5 * 2 * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("unknown=1", "unknown"),
        ("+sched.unknown=1", "sched.unknown"),
        ("sched.group=1", "group=1"),
        ("model=nowhere", "model='nowhere'"),
        ("resume=/nowhere", "resume=/nowhere"),
        ("rollout.context=100000", "rollout.context=100000"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, environment: dict[str, str], override: str, message: str
) -> None:
    run = start(environment, override, f"hydra.run.dir={tmp_path}/run")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert message in err


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_keeps_to_its_own_folder(
    tmp_path: Path, calm: Path, environment: dict[str, str], resume: bool
) -> None:
    before = (calm / "config.yaml").read_bytes()
    elsewhere = (f"resume={calm}", f"hydra.run.dir={tmp_path}/run")
    run = start(environment, *(elsewhere if resume else ("seed=7", f"hydra.run.dir={calm}")))
    _, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert f"resume={calm}" in err
    assert (calm / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "override", ["seed=1", "task=notes", "++plain.model=micro", "eval.episodes=9", "+experiment=x"]
)
def test_a_resume_does_not_become_another_run(calm: Path, override: str) -> None:
    assert continued(calm, [f"resume={calm}", "steps=9"])["steps"] == 9
    with pytest.raises(UserError, match=re.escape(override.removeprefix("++plain."))):
        continued(calm, [f"resume={calm}", override])


@pytest.mark.parametrize("name", [file.stem for file in (CONFIGS / "mesh").glob("*.yaml")])
def test_a_resume_takes_a_mesh_by_name_as_a_fresh_run_does(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\nmesh: {data: 7, tensor: 7}\n")
    overrides = ["mesh.expert=5", f"mesh={name}", "logging=none"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        fresh = compose("train", overrides=overrides)
    wanted = {"steps": 3, "mesh": OmegaConf.to_container(fresh.mesh)}
    assert continued(tmp_path, overrides) == wanted


def test_a_resume_names_a_mesh_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    with pytest.raises(UserError, match="mesh=desk is none of experts, host, one, pod, slices"):
        continued(tmp_path, ["mesh=desk"])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["warm start", "RL"])
def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, environment: dict[str, str], phase: str
) -> None:
    folder = tmp_path / "run"
    endless = ("steps=1000",) if phase == "RL" else ("warm.steps=1000000",)
    run = start(environment, *TINY, *endless, f"hydra.run.dir={folder}")
    wait_for(run, lambda: bool(rows(folder)) if phase == "RL" else (folder / "warm").exists())
    run.send_signal(signal.SIGINT)
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


def test_a_fault_is_a_trace_and_status_1(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "run"
    run = start(environment, *TINY, f"hydra.run.dir={folder}", python=("-c", BREAKING))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (1, "")
    assert "Traceback" in err
    assert err.splitlines()[-2:] == [
        "fault: RuntimeError: the device is gone",
        f"to go on: python -m experiments.train resume={folder}",
    ]


def test_the_gate_keeps_rl_from_starting_at_chance(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    overrides = (*SYNCHRONOUS, "warm.steps=1", "warm.gate=0.9", f"hydra.run.dir={tmp_path}/run")
    _, err = (run := start(environment, *overrides)).communicate(timeout=300)
    assert run.returncode == 2
    assert "warm.gate=0.9" in err


def test_a_multirun_is_one_run_folder_a_job(tmp_path: Path, environment: dict[str, str]) -> None:
    overrides = (*SYNCHRONOUS, "steps=1", "warm.steps=2", "eval.episodes=2")
    run = start(environment, "-m", "seed=0,1", *overrides, f"hydra.sweep.dir={tmp_path}/sweep")
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    summaries = [json.loads(line) for line in out.splitlines()]
    assert [Path(s["run_dir"]).name for s in summaries] == ["0", "1"]
    for number, summary in enumerate(summaries):
        folder = Path(summary["run_dir"])
        assert json.loads((folder / "summary.json").read_text()) == summary
        assert f"seed: {number}" in (folder / "config.yaml").read_text()
