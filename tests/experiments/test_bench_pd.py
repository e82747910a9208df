"""The benchmark of gaps between tokens: its rows, its folder, what it refuses."""

import json
from pathlib import Path

import pytest

from experiments.bench_pd import BenchConfig, run
from forge_jax.config import MeshConfig, UserError

SIZES = {"model": "quick", "streams": 2, "storm": 2, "prompt": 96, "new_tokens": 24, "chunk": 64}


def test_a_benchmark(tmp_path: Path) -> None:
    """On meshes that are cut differently."""
    cfg = BenchConfig(**SIZES, deterministic=True, repeat=1, prefill=MeshConfig(tensor=2))
    found = run(cfg, tmp_path)
    json.dumps(found)
    assert [row["engine"] for row in found["rows"]] == ["together", "apart"]
    for row in found["rows"]:
        assert 0 < row["itl_p50"] <= row["itl_p99"]
        assert 0 < row["itl_cpu_p50"] <= row["itl_cpu_p99"]
        assert len(row["itl_p99_by_turn"]) == 1
    one, other = found["rows"]
    assert found["ratio"]["itl_p99"] == pytest.approx(one["itl_p99"] / other["itl_p99"])
    assert found["moved_bytes"] > 0
    assert (tmp_path / "gaps.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="holds a benchmark already"):
        run(cfg, tmp_path)


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs 8 devices, found 7"):
        run(BenchConfig(**SIZES, prefill=MeshConfig(tensor=8)), tmp_path)


def test_a_size_below_one_is_named() -> None:
    with pytest.raises(ValueError, match="repeat=0 must be at least 1"):
        BenchConfig(repeat=0)
