"""The comparison of policies: budgets hold in its rows, its plot is drawn, mistakes are named."""

from pathlib import Path
from typing import Any

import pytest
from random_episodes import random_group
from refusals import refused

from experiments.bench_window import BenchConfig, bench, main
from forge_jax.config import UserError
from forge_jax.sched.pool import Pool

SMALL: dict[str, Any] = {
    "workloads": ("lognormal", "mixed"),
    "pool": None,
    "supplies": (0.8, 4.0),
    "policies": ("fifo", "third", "greedy", "drop", "versions", "tuned", "deadline", "online"),
    "in_flight": 32,
    "batch": 4,
    "updates": 60,
    "lag_updates": None,
    "deadline": 0.1,
    "skew": 0.9,
    "horizon": 20,
    "every": 20,
    "instances": 2,
    "slowdown": 0.0,
    "failure_seconds": 50.0,
    "repair_seconds": 1.0,
    "item_failures": 0.0,
    "seed": 0,
    "plot": None,
}


def test_policies_at_an_equal_lag_budget(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    found = bench(BenchConfig(**SMALL | {"plot": str(plot)}))
    assert plot.read_bytes().startswith(b"\x89PNG")
    budget = (32 + 9 - 1) // 4 + 1
    rows = {(r["workload"], r["supply"], r["policy"]): r for r in found["rows"]}
    assert len(rows) == 2 * 2 * 8
    for (_, _, policy), row in rows.items():
        if policy != "greedy":
            assert row["updates_max"] <= budget
        if policy == "fifo":
            assert (row["skew_waves"], row["window"]) == (0.0, 0)
        if policy not in ("drop", "deadline"):
            assert row["given_up"] == 0.0
    for workload in SMALL["workloads"]:
        fifo, greedy = (rows[workload, 0.8, policy] for policy in ("fifo", "greedy"))
        assert fifo["relative"] < greedy["relative"] == 1.0
        third, limited = (rows[workload, 0.8, policy] for policy in ("third", "deadline"))
        assert limited["items_per_second"] > third["items_per_second"]
        assert limited["given_up"] > 0, "which is what a deadline costs"
    assert len(found["reasons"]) == 2 * 4, "of tuned and of online"


def test_a_pool_is_a_workload(tmp_path: Path) -> None:
    pool = Pool.open(str(tmp_path))
    for item in range(8):
        pool.put(item, random_group(item))
    cfg = BenchConfig(**SMALL | {"workloads": (), "pool": str(tmp_path), "policies": ("third",)})
    rows = bench(cfg)["rows"]
    assert [(row["workload"], row["relative"]) for row in rows] == [("pool", None)] * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"workloads": ("heavy",)}, "workloads=heavy"),
        ({"policies": ("lifo",)}, "policies=lifo"),
        ({"supplies": (0.0,)}, "supplies=0.0"),
        ({"updates": 2}, "updates=2"),
        ({"lag_updates": 3}, "lag_updates=3 is too few"),
        ({"skew": 0.001, "policies": ("tuned",), "item_failures": 0.5}, "skew=0.001"),
        ({"deadline": 0.0}, "deadline=0.0"),
        ({"plot": "a.doc"}, "plot='a.doc'"),
    ],
)
def test_a_bad_key_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises((UserError, ValueError), match=named):
        bench(BenchConfig(**SMALL | change))


def test_unknown_keys_exit_with_2() -> None:
    assert "polices" in refused(main, "polices=[fifo]")
