"""A disk that takes no more: what was whole stays so, and one line says where and how full.

The limit on the size of a file is a real one: the system refuses what is beyond it.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.config import LogConfig, OptimConfig
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.report import Reporter, read_rows
from forge_jax.rl.state import create
from forge_jax.rl.writing import write_whole

LIMIT = 1 << 16  # bytes of a file


@contextmanager
def full() -> Iterator[None]:
    """No file of this process grows beyond LIMIT while the block runs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Its threads outlive the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    optim = OptimConfig()
    small = create({"w": jnp.arange(4.0)}, optim)
    large = create({"w": jax.random.normal(jax.random.key(0), (4 * LIMIT,))}, optim)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, small, {"head": 3})
        with full(), pytest.raises(OSError, match=rf"{tmp_path}/2 cannot be written, \d+ MB are"):
            checkpoints.save(2, large, {})
    with closing(Checkpoints(tmp_path)) as again:
        assert again.latest() == 1
        found, host = again.restore(1, small)
        assert host == {"head": 3}
        np.testing.assert_array_equal(found.params["w"], small.params["w"])
        again.save(2, large, {})  # once there is room
        assert again.latest() == 2


def test_a_row_that_does_not_fit_is_none(tmp_path: Path) -> None:
    with closing(Reporter(tmp_path, LogConfig(), {}, last_step=0)) as reporter:
        reporter.add({"step": 1})
        with full(), pytest.raises(OSError, match=r"metrics.jsonl cannot be written, \d+ MB are"):
            reporter.add({"step": 2, "long": "x" * 2 * LIMIT})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    with closing(Reporter(tmp_path, LogConfig(), {}, last_step=1)) as reporter:
        reporter.add({"step": 2})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_text_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, json.dumps({"steps": 1}))
    with full(), pytest.raises(OSError, match=r"summary.json cannot be written, \d+ MB are free"):
        write_whole(path, "x" * 2 * LIMIT)
    assert json.loads(path.read_text()) == {"steps": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["summary.json"]
