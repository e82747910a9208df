"""The benchmark of one long path, on a short one."""

from pathlib import Path

import pytest

from experiments.bench_long import LongConfig, run
from forge_jax.config import UserError, load


@pytest.mark.slow
def test_a_short_long_path(tmp_path: Path) -> None:
    found = run(LongConfig(model="micro", tokens=700, budget=128, compare=256), tmp_path)
    assert found["loss_difference"] < 1e-5
    assert found["gradient_difference"] < 1e-5
    # Two layers of two key heads of 32, keys and values, and fp32 gradients of both.
    assert found["kept_bytes"] >= (700 - 128) * 2 * 2 * 2 * 32 * (4 + 4)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["tokens", "compare"])
def test_a_path_within_the_budget_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}=100 must be beyond budget=128"):
        load(LongConfig, {"model": "micro", "budget": 128, name: 100})
