"""What of a run is saved while it goes on."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import pytest
from rich.progress import Progress
from small_run import config

from forge_jax.config import LogConfig, OptimConfig
from forge_jax.rl import keeping
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.keeping import Keeper, Run
from forge_jax.rl.loop import Prepared, Step
from forge_jax.rl.measure import Totals
from forge_jax.rl.report import Reporter
from forge_jax.rl.state import create

ROW = {
    "episodes": 1, "tokens_sampled": 1, "tokens_trained": 1, "skipped": None, "tokens_total": 1,
    "tokens_unique": 1, "lags": [0], "items": [0], "reward": 0.0, "mean_turns": 1.0,
    "lag_mean": 0.0, "stepped": True,
}  # fmt: skip


@pytest.mark.parametrize(("late", "saved"), [(0, [1, 2]), (1, [2])])
def test_a_run_that_cannot_go_on_saves_nothing_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, saved: list[int]
) -> None:
    monkeypatch.setattr(keeping, "draw_curves", lambda *_: None)
    wanted = config(synchronous=True, in_flight=2, hold_updates=late)
    cfg = dataclasses.replace(wanted, steps=2, checkpoint_every=1)
    state = create({"w": jnp.zeros(2)}, OptimConfig())
    batch = Prepared(samples=(), turns=(), minibatches=(), left_out={})
    with (
        closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints,
        closing(Reporter(tmp_path, LogConfig(), {}, 0)) as reporter,
    ):
        nobody = cast(Any, None)
        run = Run(
            cfg=cfg, model=nobody, agents={}, folder=tmp_path, pool=nobody, device=nobody,
            bars=Progress(disable=True), checkpoints=checkpoints, reporter=reporter, began=0.0,
        )  # fmt: skip
        keeper = Keeper(run, 0, Totals())
        for number in (1, 2):
            keeper.keep(Step(state=state, cursors={}, batch=batch, row={"step": number} | ROW))
        assert checkpoints.steps() == saved
