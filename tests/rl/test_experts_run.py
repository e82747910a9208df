"""A run with experts that is killed goes on as if it had not been: routes, biases and all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import config

from experiments.chaos import timeless
from experiments.models import resolve
from forge_jax.config import MoeConfig
from forge_jax.rl import loop, run
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.report import read_rows
from forge_jax.rl.state import create
from forge_jax.sched.pool import Pool

SYNCHRONOUS = config(warm=60, synchronous=True, in_flight=2, window=0, episode_seconds=60.0)
CFG = dataclasses.replace(
    SYNCHRONOUS,
    model="quick-moe",
    rollout=dataclasses.replace(SYNCHRONOUS.rollout, routes=True),
    moe=MoeConfig(balance="bias", rate=0.003),
)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The rows of a run without its times, and the biases it ended with."""
    model = resolve(CFG.model)
    checkpoints = Checkpoints(folder / "checkpoints")
    state, _ = checkpoints.restore(CFG.steps, create(model.params, CFG.optim))
    checkpoints.close()
    rows = read_rows(folder / "metrics.jsonl")
    kept = [timeless(row) for row in rows]
    return kept, np.asarray(state.params["layers"]["router_bias"])


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_routes_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    run.train(CFG, resolve(CFG.model), calm, {})

    real = loop.update

    def breaks(*args: Any) -> Any:
        if (broken / "metrics.jsonl").stat().st_size:
            raise RuntimeError("the trainer broke")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", breaks)
        with pytest.raises(ExceptionGroup):
            run.train(CFG, resolve(CFG.model), broken, {})
    run.train(CFG, resolve(CFG.model), broken, {})

    (rows, bias), (want_rows, want_bias) = outcome(broken), outcome(calm)
    assert json.dumps(rows) == json.dumps(want_rows)
    np.testing.assert_array_equal(bias, want_bias)
    assert np.abs(bias).max() > 0
    assert all(row["expert_load_max"] >= 1 for row in rows if row["stepped"])
    pool = Pool.open(str(broken / "pool"))
    turns = [turn for n in pool.items() for e in pool.get(n) for turn in e.turns]
    assert turns
    for turn in turns:
        assert turn.routes.shape == (len(turn.prompt) + len(turn.output), 2, 2)
        assert (turn.routes[:-1] >= 0).all()
