"""The command: its JSON, its overrides, its exit status, and one clear line for mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from experiments.simulate import main, run
from forge_jax.config import UserError

ROOT = Path(__file__).parent.parent.parent
TRACE = {"service": [5, 1, 1, 1, 1], "train_seconds": 2, "in_flight": 3, "batch": 2}
KEYS = {
    "trace": None,
    "policy": "window",
    "window": "auto",
    "lag_updates": None,
    "in_flight": None,
    "batch": None,
    "train_seconds": None,
    "plot": None,
}


def write(folder: Path, trace: Any = TRACE) -> str:
    file = folder / "trace.json"
    file.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return str(file)


def simulate(folder: Path, content: Any = TRACE, **overrides: Any) -> dict[str, Any]:
    return dict(run(KEYS | {"trace": write(folder, content)} | overrides))


def call(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.simulate", *overrides],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_one_object_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = call(tmp_path, f"trace={write(tmp_path)}", "policy=window", "window=2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    schedule = json.loads(result.stdout)
    assert schedule.pop("order") == [1, 2, 0, 3, 4]
    assert schedule.pop("batches") == [[1, 2], [0, 3], [4]]
    assert schedule == pytest.approx(
        {
            "lag_max": 2,
            "lag_mean": 7 / 5,
            "lag_bound": 4,
            "trainer_idle": 3 / 9,
            "generator_idle": 1 - 9 / 27,
            "makespan": 9.0,
            "skew": 5 / 9 - 1,
            "window": 2,
        }
    )
    assert "consumed 5 of 5" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [("wndow=3", "wndow"), ("policy=lifo", "policy='lifo'"), ("window=3", "trace")],
)
def test_the_callers_mistakes_exit_with_2(tmp_path: Path, overrides: str, named: str) -> None:
    given = [f"trace={write(tmp_path)}"] if named != "trace" else []
    assert named in refused(main, *given, overrides)


def test_policies_are_windows(tmp_path: Path) -> None:
    slow_head = {"service": [99, *[1] * 40], "train_seconds": 1, "in_flight": 10, "batch": 1}
    windows = {
        ("fifo", "auto"): 0,
        ("greedy", "auto"): None,
        ("window", "auto"): 3,
        ("window", 7): 7,
        ("window", 0): 0,
        ("window", 0.55): 5,
        ("window", 1.0): 10,
        ("window", None): None,
    }
    for (policy, window), meant in windows.items():
        result = simulate(tmp_path, slow_head, policy=policy, window=window)
        assert result["window"] == meant
        assert result["lag_bound"] == (None if meant is None else 9 + meant)
        assert result["order"].index(0) == (40 if meant is None else meant)


def test_a_window_from_a_lag_budget(tmp_path: Path) -> None:
    result = simulate(tmp_path, lag_updates=4)
    assert (result["window"], result["lag_bound"]) == (4 * 2 - 3, 7)
    assert result["lag_bound"] // 2 + 1 == 4, "and one more would be 5"
    with pytest.raises(UserError, match="in_flight=3: a lag of 1 updates of 2 items"):
        simulate(tmp_path, lag_updates=1)


def test_a_window_that_is_not_used_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, policy="fifo", window=3)["window"] == 0
    assert "window=3 is not used" in capsys.readouterr().err


def test_overrides_win_over_the_trace_and_complete_it(tmp_path: Path) -> None:
    sizes = {"in_flight": 1, "batch": 5, "train_seconds": 0.5}
    result = simulate(tmp_path, **sizes)
    assert result["batches"] == [[0, 1, 2, 3, 4]], "a batch may be larger than in_flight"
    assert result["makespan"] == 9.5
    assert simulate(tmp_path, {"service": TRACE["service"]}, **sizes) == result


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        ("{", "trace='.*trace.json' is not JSON"),
        ("[1, 2]", "list, not an object"),
        ({k: v for k, v in TRACE.items() if k != "batch"}, "missing key batch"),
        (TRACE | {"service": [1, -2]}, r"service\[1\]=-2.0"),
        (json.dumps(TRACE).replace("5", "NaN"), r"service\[0\]=nan"),
        (json.dumps(TRACE).replace("5", "1" * 400), "largest float"),
        (TRACE | {"in_flight": 0}, "in_flight=0"),
        (TRACE | {"train_seconds": "2"}, "train_seconds='2'"),
        (TRACE | {"windw": 2}, "windw=2"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, trace: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        simulate(tmp_path, trace)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"trace": "missing.json"}, "trace='missing.json' cannot be read"),
        ({"trace": 7}, "trace=7"),
        ({"policy": None}, "policy=None"),
        ({"window": -1}, "window=-1"),
        ({"window": 1.5}, "window=1.5"),
        ({"window": True}, "window=True"),
        ({"window": -0.1}, "window=-0.1"),
        ({"lag_updates": 0}, "lag_updates=0"),
        ({"lag_updates": 2, "window": 3}, "lag_updates=2"),
        ({"lag_updates": 2, "policy": "fifo"}, "lag_updates=2"),
        ({"window": -1, "policy": "greedy"}, "window=-1"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"plot": "nowhere/at/all.png"}, "plot='nowhere/at/all.png'"),
        ({"plot": "plot.doc"}, r"plot='plot\.doc'"),
    ],
)
def test_a_bad_key_is_named(tmp_path: Path, overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        simulate(tmp_path, **overrides)


@pytest.mark.parametrize("policy", ["window", "greedy"])
def test_the_plot_is_drawn(tmp_path: Path, policy: str) -> None:
    simulate(tmp_path, policy=policy, plot=str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
