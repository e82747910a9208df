"""The pool's benchmark: every item is put once and is there; what is no measurement is refused."""

from pathlib import Path

from refusals import refused

from experiments.bench_pool import BenchConfig, bench, episodes, main
from forge_jax.sched.codec import encode
from forge_jax.sched.pool import Pool


def test_what_was_measured_is_in_the_pool(tmp_path: Path) -> None:
    cfg = BenchConfig(pool=str(tmp_path / "pool"), writers=2, items=7, group=2, turns=1, tokens=5)
    found = bench(cfg)
    pool = Pool.open(cfg.pool)
    assert pool.items() == tuple(range(7))
    assert pool.get_object(6) == encode(episodes(cfg, 6))
    assert found["item_bytes"] == len(pool.get_object(0))
    assert 0 < found["put_p50_ms"] <= found["put_p99_ms"]
    again = refused(main, f"pool={cfg.pool}")
    assert "has items" in again


def test_a_share_for_every_writer(tmp_path: Path) -> None:
    assert "items=2 < writers=3" in refused(main, f"pool={tmp_path}", "items=2", "writers=3")
    assert "turns=0 must be at least 1" in refused(main, f"pool={tmp_path}", "turns=0")
