"""Runs compared: groups, means over seeds, what it took to come to a target, what is refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_multirun, make_run
from refusals import QUIET, refused

from experiments.compare import main
from experiments.comparing import axis, band, curve, grouped, reached, read_run, read_runs


@pytest.fixture(scope="module")
def multirun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_multirun(tmp_path_factory.mktemp("multirun") / "window")


def compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["compare", *QUIET, *overrides])
    main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("by", ["null", "[sched.window]"])
def test_a_multirun_is_grouped_by_what_it_sweeps(
    multirun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: str,
) -> None:
    plot = tmp_path / "plot.png"
    call = (f"runs={multirun}", f"by={by}", "target=0.5", "smooth=1", f"plot={plot}")
    found = compared(monkeypatch, capsys, *call, "y=[reward,reward_slow]")
    assert plot.stat().st_size > 0
    slow, fast = found["groups"]
    assert [group["by"] for group in (slow, fast)] == [{"sched.window": 0}, {"sched.window": 8}]
    assert slow["seeds"] == fast["seeds"] == [0, 1, 2]
    assert slow["last"]["reward"]["mean"] == pytest.approx(np.mean([0.95, 1.0, 1.0]))
    assert slow["scores"]["eval_after"] == slow["last"]["reward"]
    assert "eval_after_ci" not in slow["scores"]
    # Seed s of gain g comes to 0.5 at row 0.5 / g - s + 1.
    for group, rows, seconds in ((slow, 10.0, 20.0), (fast, 5.0, 5.0)):
        told = group["to_target"]["all"]
        assert (told["reached"], told["of"]) == (3, 3)
        assert told["steps"]["mean"] == pytest.approx(rows)
        assert told["seconds"]["mean"] == pytest.approx(seconds)
        assert told["tokens"]["mean"] == pytest.approx(10 * rows)
        assert told["steps"]["low"] <= rows <= told["steps"]["high"]


def test_one_run_is_told_without_an_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.0, 1.0])
    [group] = grouped(read_runs([str(run)], partial=False), None)
    assert (group.by, group.name) == ({}, "all")


def test_axes_add_up_and_rows_without_the_number_count_for_them(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [0.0, None, 1.0, 0.5], seconds=3.0))
    assert axis(run, "seconds").tolist() == [3, 6, 9, 12]
    assert axis(run, "tokens").tolist() == [10, 20, 30, 40]
    at, values = curve(run, "steps", "reward", smooth=2)
    assert at.tolist() == [1, 3, 4]
    assert values.tolist() == [0, 0.5, 0.75]


def test_a_target_is_met_by_as_many_rows_as_are_smoothed(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [1.0, 0.0, 0.9, 0.9, 0.9]))
    assert reached(run, "steps", "reward", 1, 0.9) == 1
    assert reached(run, "steps", "reward", 3, 0.9) == 5
    assert reached(run, "steps", "reward", 4, 0.9) is None


def test_a_band_holds_its_mean_and_ends_with_its_shortest_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed, length in enumerate((9, 12, 15)):
        make_run(tmp_path / str(seed), rng.random(length).tolist(), seed=seed, steps=15)
    [group] = grouped(read_runs([str(tmp_path)], partial=True), None)
    grid, middle, low, high = band(group, "steps", "reward", 2)
    assert (grid[0], grid[-1]) == (1, 9)
    assert np.all((low <= middle + 1e-12) & (middle <= high + 1e-12))


def test_what_cannot_be_compared_is_refused(tmp_path: Path, multirun: Path) -> None:
    def complaint(*overrides: str) -> str:
        return refused(main, *overrides)

    assert "by=sched.windows: no run" in complaint(f"runs={multirun}", "by=[sched.windows]")
    assert "differ in sched.window, too" in complaint(f"runs={multirun}", "by=[task]")
    assert "y=rewards" in complaint(f"runs={multirun}", "y=rewards")
    assert f"runs={tmp_path}: no run there" in complaint(f"runs={tmp_path}")
    assert "x='hours'" in complaint(f"runs={multirun}", "x=hours")


def test_runs_that_have_not_ended_are_named(tmp_path: Path, multirun: Path) -> None:
    folder = tmp_path / "window"
    shutil.copytree(multirun, folder)
    made = make_run(folder / "unended", [0.1], seed=3, steps=20, ended=False)
    line = refused(main, f"runs={folder}")
    assert str(made) in line
    assert "seed=0" not in line
    assert len(read_runs([str(folder)], partial=True)) == 7
