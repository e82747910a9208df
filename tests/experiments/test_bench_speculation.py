"""A run gone on with by modules that learn and by frozen ones has one policy and one history."""

from pathlib import Path

import numpy as np
import pytest

from experiments.bench_speculation import BenchConfig, run
from forge_jax.config import UserError
from forge_jax.rl.report import read_rows

SIZES = BenchConfig(seeds=(0,), warm=60, online=2, after=2, group=8, batch=2)


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
    with pytest.raises(UserError, match="holds a benchmark already"):
        run(SIZES, tmp_path)


def test_the_defaults_are_those_of_the_file() -> None:
    from omegaconf import OmegaConf

    from experiments.command import CONFIGS
    from forge_jax.config import load

    mapping = OmegaConf.to_container(OmegaConf.load(f"{CONFIGS}/bench_speculation.yaml"))
    assert isinstance(mapping, dict)
    del mapping["defaults"], mapping["hydra"]
    assert load(BenchConfig, mapping) == BenchConfig()
