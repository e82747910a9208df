"""The training command: its files, and that a kill at any moment changes nothing.

Runs are tiny (a few updates of two groups), synchronous where they are compared.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from refusals import QUIET, refused
from train_command import SYNCHRONOUS, TINY, finish, kill_after, rows, start

from experiments import command
from experiments.chaos import timeless
from experiments.runs import summary_of
from experiments.train import check_sources, continued, main
from forge_jax.config import UserError
from forge_jax.sched.pool import Pool

CONFIGS = Path(command.CONFIGS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    summary = finish(start(*SYNCHRONOUS, f"hydra.run.dir={folder}"))
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


def test_a_checkpoint_of_the_run_is_a_model_that_evaluates_alike(calm: Path) -> None:
    picture = calm / "eval.png"
    greek = "scripts=[GREEK]"
    overrides = ("task=hop,calc", "episodes=8", "rollout.slots=16", greek, f"plot={picture}")
    model = f"model={calm}/checkpoints/5"
    rows = finish(start(model, *overrides, python=("-m", "experiments.eval")))["rows"]
    assert [row["task"] for row in rows] == ["hop", "calc"]
    assert picture.stat().st_size > 0
    found = rows[0]
    assert "language" in found["faults"], "which is measured where scripts are named"
    summary = json.loads((calm / "summary.json").read_text())
    assert found["success"] == summary["eval_after"]
    assert found["success_ci"] == summary["eval_after_ci"]
    assert found["mean_turns"] == summary["mean_turns"]


@pytest.mark.slow
def test_a_killed_synchronous_run_continues_to_the_same_numbers(tmp_path: Path, calm: Path) -> None:
    rng = np.random.default_rng(int(os.environ.get("TRAIN_CHAOS_SEED", "0")))
    folder = tmp_path / "run"
    run = start(*SYNCHRONOUS, f"hydra.run.dir={folder}")
    kill_after(run, folder, step=int(rng.integers(1, 4)), delay=float(rng.random() * 0.3))
    summary = finish(start(*SYNCHRONOUS, f"hydra.run.dir={folder}"))
    want = json.loads((calm / "summary.json").read_text())
    for timing in ("seconds", "run_dir"):
        summary.pop(timing), want.pop(timing)
    assert summary == want
    for got, expected in zip(rows(folder), rows(calm), strict=True):
        assert timeless(got) == timeless(expected)


@pytest.mark.slow
def test_an_asynchronous_run_killed_again_and_again_counts_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(int(os.environ.get("TRAIN_CHAOS_SEED", "0")))
    folder, call = tmp_path / "run", (*TINY, f"hydra.run.dir={tmp_path}/run")
    for step in (1, 3):
        kill_after(start(*call), folder, step=step, delay=float(rng.random() * 0.5))
        call = (f"resume={folder}",)
    summary = finish(start(*call))
    history = [number for row in rows(folder) for number in row["items"]]
    assert len(history) == len(set(history)) == 10
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]
    assert summary["lag_max"] <= summary["lag_bound"] == 4 + 2 - 1
    assert summary["episodes"] == 5 * 2 * 4
    pool = Pool.open(str(folder / "pool"))
    episodes = [episode for number in history for episode in pool.get(number)]
    assert [episode.replica for episode in episodes] == [0, 1, 2, 3] * 10
    sampled = sum(len(turn.output) for episode in episodes for turn in episode.turns)
    assert summary["tokens_sampled"] == sampled
    assert sampled == sum(row["tokens_sampled"] for row in rows(folder))
    for row in rows(folder):  # nothing is sampled before its group was admitted
        assert (row["version_lag_max"] or 0) <= row["lag_updates_max"]


def test_the_same_call_again_finds_the_run_ended(
    calm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path: path.stat().st_mtime_ns for path in calm.rglob("*.json*")}
    monkeypatch.setattr(sys, "argv", ["train", *QUIET, *SYNCHRONOUS, f"hydra.run.dir={calm}"])
    main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == json.loads((calm / "summary.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in calm.rglob("*.json*")} == files


def test_a_run_with_steps_to_come_has_not_ended(tmp_path: Path, calm: Path) -> None:
    config = OmegaConf.load(calm / "config.yaml")
    OmegaConf.save(OmegaConf.merge(config, {"steps": 9}), tmp_path / "config.yaml")
    shutil.copy(calm / "summary.json", tmp_path)
    assert summary_of(calm) is not None
    assert summary_of(tmp_path) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_keeps_to_its_own_folder(tmp_path: Path, calm: Path, resume: bool) -> None:
    before = (calm / "config.yaml").read_bytes()
    elsewhere = (f"resume={calm}", f"hydra.run.dir={tmp_path}/run")
    overrides = elsewhere if resume else ("seed=7", f"hydra.run.dir={calm}")
    line = refused(main, *overrides)
    assert f"resume={calm}" in line
    assert resume or "seed=0, here 7" in line
    assert (calm / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "task=notes",
        "++plain.model=micro",
        "++plain.pool=/b",
        "eval.episodes=9",
        "+experiment=x",
    ],
)
def test_a_resume_does_not_become_another_run(calm: Path, override: str) -> None:
    assert continued(calm, [f"resume={calm}", "steps=9"])["steps"] == 9
    with pytest.raises(UserError, match=re.escape(override.removeprefix("++plain."))):
        continued(calm, [f"resume={calm}", override])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("steps", -1, "steps=-1 must be >= 0"), ("dtype", "float16", "dtype='float16' must be one")],
)
def test_what_other_keys_are_made_of_is_refused_by_its_own_name(
    key: str, value: object, said: str
) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        check_sources({"steps": 3, "dtype": "float32", key: value})


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
