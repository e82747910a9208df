"""metrics.jsonl is monotone in its step, also after a resume and after a torn last line."""

import json
from pathlib import Path

import pytest

from forge_jax.config import LogConfig, UserError
from forge_jax.rl.report import Reporter, read_rows


def test_a_resume_cuts_back_to_its_checkpoint(tmp_path: Path) -> None:
    first = Reporter(tmp_path, LogConfig(), {}, last_step=0)
    for step in range(1, 6):
        first.add({"step": step, "reward": 0.1 * step})
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "rew')  # killed while writing
    again = Reporter(tmp_path, LogConfig(), {}, last_step=3)
    again.add({"step": 4, "reward": 9.0})
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["reward"] == 9.0


def test_a_step_that_goes_backwards_is_refused(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, LogConfig(), {}, last_step=0)
    reporter.add({"step": 2})
    with pytest.raises(ValueError, match="step 2 after step 2"):
        reporter.add({"step": 2})
    reporter.close()


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_rows(path)
