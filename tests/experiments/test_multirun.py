"""Multiruns: folders that the same call finds again, jobs that fail and take no other down."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import QUIET

from experiments.command import LONGEST_NAME, command, run_name
from forge_jax.config import UserError

FAILURES = {1: UserError("seed=1 is no good"), 2: RuntimeError("broken"), 3: KeyboardInterrupt()}


@command("train")
def fails_by_seed(mapping: dict[str, Any]) -> dict[str, Any]:
    if mapping["seed"] in FAILURES:
        raise FAILURES[mapping["seed"]]
    return {"seed": mapping["seed"]}


def ended(folder: Path, seeds: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a multirun over `seeds`."""
    place = (f"hydra.sweep.dir={folder}", f"seed={seeds}")
    monkeypatch.setattr(sys, "argv", ["command", "-m", *QUIET, *place])
    try:
        fails_by_seed()
    except SystemExit as end:
        return int(str(end.code))
    return 0


@pytest.mark.parametrize(
    ("seeds", "status", "told"),
    [
        ("0,4", 0, [{"seed": 0}, {"seed": 4}]),
        ("0,1,2,4", 2, [{"seed": 0}, {"error": "seed=1 is no good"},
                        {"error": "fault: RuntimeError: broken"}, {"seed": 4}]),
        ("0,3,4", 130, [{"seed": 0}]),
    ],
)  # fmt: skip
def test_all_jobs_run_but_after_an_interrupt(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: str,
    status: int,
    told: list[dict[str, Any]],
) -> None:
    assert ended(tmp_path, seeds, monkeypatch) == status
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == told
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {f"seed={seed}" for seed in seeds.split(",")[: len(told) + (status == 130)]}


def test_a_jobs_folder_is_named_by_its_overrides_in_any_order() -> None:
    overrides = ("+experiment=x", "seed=0", "++plain.model=/runs/a b", "sched.window=null")
    for order in itertools.permutations(overrides):
        assert run_name(order) == "model=_runs_a_b,sched.window=null,seed=0"
    assert run_name(["+experiment=x"]) == "default"


def test_long_names_fit_a_folder_and_stay_apart() -> None:
    many = [f"key{i}=1" for i in range(99)]
    names = {run_name([*many, f"seed={seed}"]) for seed in range(5)}
    assert len(names) == 5
    assert {len(name) for name in names} == {LONGEST_NAME}
