"""The benchmark of routing policies: its rows, its verdicts, what it refuses."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.bench_router import BenchConfig, run, verdicts
from forge_jax.config import UserError, load

CONFIG = Path(__file__).parent.parent.parent / "configs" / "bench_router.yaml"
CONTRACT = {"policy", "trace", "ttft_mean", "ttft_p99", "hit_rate", "transferred_bytes"}


def config(*changes: str) -> BenchConfig:
    read = OmegaConf.load(CONFIG)
    given = {key: read[key] for key in read if key not in ("defaults", "hydra", "out")}
    merged = OmegaConf.merge(given, OmegaConf.from_dotlist(list(changes)))
    return load(BenchConfig, OmegaConf.to_container(merged, resolve=True))  # type: ignore[arg-type]


def test_a_benchmark(tmp_path: Path) -> None:
    cfg = config(
        "traces=[groups,unshared]", "instances=[2]", "policies=[cost,sticky]", "seeds=[0,1]",
        "cases.groups.trace.sessions=40", "cases.unshared.trace.sessions=20",
    )  # fmt: skip
    found = run(cfg, tmp_path)
    json.dumps(found)
    rows = found["rows"]
    assert [(r["trace"], r["policy"]) for r in rows] == [
        (t, p) for t in ("groups", "unshared") for p in ("cost", "sticky")
    ]
    for row in rows:
        assert set(row) >= CONTRACT
        assert row["ttft_mean"] == pytest.approx(sum(row["ttft_mean_by_seed"]) / 2)
        assert 0 < row["ttft_mean"] <= row["ttft_p99"]
    assert rows[0]["hit_rate"] > 0.5 > rows[2]["hit_rate"] == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert (tmp_path / "router.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="holds a benchmark already"):
        run(cfg, tmp_path)


def test_a_verdict_compares_with_the_best_of_the_others() -> None:
    def row(policy: str, mean: float, p99: float) -> dict:
        times = {"ttft_mean": mean, "ttft_p99": p99}
        by_seed = {f"{key}_by_seed": [value, value] for key, value in times.items()}
        return {"policy": policy, "trace": "t", "instances": 4} | times | by_seed

    mean, p99 = verdicts([row("cost", 1.0, 9.0), row("a", 2.0, 3.0), row("b", 4.0, 2.0)])
    assert (mean["best_other"], mean["ratio"]) == ("a", 0.5)
    assert (p99["best_other"], p99["ratio_by_seed"]) == ("b", [4.5, 4.5])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("policies=[best]", "policies='best' must be among cost"),
        ("traces=[none]", "traces='none' must be among the cases agents"),
        ("instances=[0]", "instances=0 must be at least 1"),
        ("seeds=[]", "must name at least one"),
        ("weights.work=-1", "work=-1.0 must be >= 0"),
    ],
)
def test_mistakes_are_named(change: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(change)


def test_a_case_with_an_unknown_key_is_named() -> None:
    with pytest.raises(UserError, match=r"cases.groups.trace.color"):
        config("cases.groups.trace.color=1").case("groups")
