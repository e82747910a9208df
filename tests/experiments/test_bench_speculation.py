"""A run gone on with by modules that learn and by frozen ones has one policy and one history."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench_speculation import BenchConfig, run
from experiments.fixed_text import acceptance
from experiments.runs import run_config
from forge_jax.config import UserError
from forge_jax.rl.credit import group_samples
from forge_jax.rl.report import read_rows
from forge_jax.sched.pack import micro_batches
from forge_jax.sched.pool import Pool

SIZES = BenchConfig(seeds=(0,), warm=60, online=2, after=2, every=1, text=2, group=8, batch=2)


@pytest.mark.slow  # runs of RL, whose branches are the same to the bit but for what is drafted
def test_branches_differ_in_their_drafts_alone(tmp_path: Path) -> None:
    told = run(SIZES, tmp_path)
    [row] = told["rows"]
    assert row["same_policy"]
    assert row["frozen"]["reward"] == row["trained"]["reward"]
    assert row["frozen"]["tokens_per_verify"] >= 1
    trained, frozen = (
        read_rows(tmp_path / "seed0" / branch / "metrics.jsonl") for branch in ("trained", "frozen")
    )
    assert [r["step"] for r in frozen] == [1, 2, 3, 4]
    assert trained[:2] == frozen[:2]
    # The first update after the branching is of the same modules, the next one is not.
    assert trained[2]["mtp_kl_1"] == frozen[2]["mtp_kl_1"]
    assert trained[3]["mtp_kl_1"] != frozen[3]["mtp_kl_1"]
    assert all(a["loss"] == b["loss"] for a, b in zip(trained, frozen, strict=True))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert np.isfinite(told["mean"]["trained"]["acceptance_1"]).all()
    fixed = row["fixed"]
    assert [point["step"] for point in fixed["trained"]] == [0, 1, 2, 3, 4]
    assert fixed["frozen"][0] == fixed["trained"][2]
    # Modules of one checkpoint and policies of others: what a text is guessed by changes with both.
    assert len({point["fixed_acceptance_1"] for point in fixed["frozen"]}) == 3
    assert (
        told["mean"]["start"]["fixed_acceptance_1"]
        == [fixed["trained"][0]["fixed_acceptance_1"]] * 3
    )
    assert_scored_as_trained(tmp_path / "seed0" / "trained", trained[3])
    with pytest.raises(UserError, match="holds a benchmark already"):
        run(SIZES, tmp_path)


def assert_scored_as_trained(folder: Path, row: dict[str, Any]) -> None:
    """What an update finds of its own text is what the checkpoint before it is worth on it."""
    cfg, pool = run_config(folder), Pool.open(str(folder / "pool"))
    samples = [s for item in row["items"] for s, _ in group_samples(pool.get(item))]
    text = micro_batches(samples, "tree", cfg.pack, carry=False)
    before = acceptance(cfg, folder, text, since=row["step"] - 1)[0]
    assert before["step"] == row["step"] - 1
    assert before["fixed_acceptance_2"] == pytest.approx(row["mtp_accepted_2"], abs=1e-5)


def test_the_defaults_are_those_of_the_file() -> None:
    from omegaconf import OmegaConf

    from experiments.command import CONFIGS
    from forge_jax.config import load

    mapping = OmegaConf.to_container(OmegaConf.load(f"{CONFIGS}/bench_speculation.yaml"))
    assert isinstance(mapping, dict)
    del mapping["defaults"], mapping["hydra"]
    assert load(BenchConfig, mapping) == BenchConfig()
