"""The benchmark of policies on live engines: its rows, and what it refuses."""

import asyncio
import json

import pytest

from experiments.bench_live import BenchConfig, measured
from forge_jax.rollout.router.traces import TraceConfig

SMALL = TraceConfig(
    systems=1, system=64, task=16, calls=3, turn=16, reply=4, pause=0.0, spread=0.1, rate=100.0,
    sessions=2, longest=192,
)  # fmt: skip
CONTRACT = {"policy", "trace", "ttft_mean", "ttft_p99", "hit_rate", "transferred_bytes"}


def test_a_benchmark() -> None:
    cfg = BenchConfig(
        model="quick", policies=("cost", "sticky"), trace=SMALL, slots=4, chunk=64, repeat=1
    )
    found = asyncio.run(measured(cfg))
    json.dumps(found)
    assert [row["policy"] for row in found["rows"]] == ["cost", "sticky"]
    for row in found["rows"]:
        assert set(row) >= CONTRACT
        assert row["calls"] == 12
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0.3 < row["hit_rate"] < 1


def test_a_policy_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="policies='best' must be among cost"):
        BenchConfig(policies=("best",))
