"""The benchmark of attention: what it counts, what it prints, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from experiments.bench_attention import AttentionConfig, main, run, tokens_of
from forge_jax.config import UserError, load

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "implementation": "xla", "tokens": 100, "branches": 3, "heads": 2, "kv_heads": 1,
    "head_dim": 8, "dtype": "float32", "steps": 1,
}  # fmt: skip


def call(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench_attention", *overrides],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def config(**overrides: Any) -> AttentionConfig:
    return load(AttentionConfig, SMALL | overrides)


def test_the_command_prints_one_object_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = call(tmp_path, *(f"{key}={value}" for key, value in SMALL.items()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    printed = json.loads(done.stdout)
    assert printed["implementation"] == "xla"
    assert printed["pairs"] == 100 * 101 // 2
    assert printed["cudnn"] is None
    for name in ("forward_tflops", "backward_tflops", "product_tflops", "useful"):
        assert printed[name] > 0, name
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tokens=0 must be at least 1" in refused(main, "tokens=0")
    assert not list(tmp_path.iterdir())


def test_a_forest_is_a_trunk_and_its_branches() -> None:
    exit_, depth = tokens_of(config(workload="forest", tokens=16, branches=3))
    assert exit_.tolist() == [16] * 4 + [8] * 4 + [12] * 4 + [16] * 4
    assert depth.tolist() == [0, 1, 2, 3] + [4, 5, 6, 7] * 3
    exit_, depth = tokens_of(config(tokens=5))
    assert exit_.tolist() == [5] * 5
    assert depth.tolist() == [0, 1, 2, 3, 4]
    exit_, depth = tokens_of(config(workload="forest", tokens=5, branches=9))  # more than tokens
    index = np.arange(5)
    seen = (index[None] <= index[:, None]) & (index[:, None] < exit_[None])
    assert (seen.sum(1) == depth + 1).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_only_pairs_that_attend_are_counted(implementation: str) -> None:
    found = run(config(implementation=implementation, workload="forest", window=10, tile=(16, 16)))
    assert found["pairs"] < 100 * 10
    assert 0 < found["useful"] <= 1


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"implementation": "mosaic_gpu"}, "mosaic_gpu needs a gpu, and this is a cpu"),
        ({"implementation": "best"}, "implementation='best' must be one of"),
        ({"workload": "dense"}, "workload='dense' must be one of causal, forest"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"heads": 3, "kv_heads": 2}, "heads=3 of kv_heads=2"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"tile": (8,)}, r"tile=\(8,\) must be two sides"),
        ({"softcap": 0.0}, "softcap=0.0 must be positive"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
)
def test_mistakes_are_named(overrides: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        run(config(**overrides))
