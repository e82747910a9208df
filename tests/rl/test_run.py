"""A run that a fault ends goes on later as if there had been none.

Whole synchronous runs, in process, whose trainer or engine breaks after the first update and
before the first checkpoint that follows it.
"""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import pytest
from small_run import config

from experiments.models import resolve
from forge_jax.config import LossConfig, TrainConfig
from forge_jax.rl import loop, run
from forge_jax.rl.evaluate import Evaluation
from forge_jax.rl.report import read_rows
from forge_jax.rollout.runner import Runner
from forge_jax.sched.pool import Pool

# Two updates of a batch, compared with the policy before them and with that of the start: what
# goes on has to find all of it.
CFG = dataclasses.replace(
    config(
        warm=60, synchronous=True, in_flight=2, window=0, episode_seconds=60.0, updates=2, epochs=2
    ),
    loss=LossConfig(kind="clip", anchor="trainer", kl=0.1, reference="start"),
)


def played(cfg: TrainConfig, folder: Path) -> dict[str, Any]:
    """The summary of a run, without what may differ between two runs of one history."""
    summary = run.train(cfg, resolve("quick"), folder, {})
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    return {k: v for k, v in summary.items() if k not in ("seconds", "run_dir")}


def history(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    counts = ("loop_blocked", "engine_restarts", "gateway_restarts")
    return [{k: v for k, v in row.items() if k not in counts} for row in rows]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows of a run without a fault."""
    folder = tmp_path_factory.mktemp("calm")
    summary = played(CFG, folder)
    rows = history(folder)
    assert any(row["updates"] > 2 for row in rows)
    assert any(row.get("kl_reference", 0) > 0 for row in rows)
    return summary, rows


def break_after_an_update(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first row of metrics on, the trainer or the engine raises."""
    owner, name = {"trainer": (loop, "update"), "engine": (Runner, "_decode")}[part]
    real = getattr(owner, name)

    def broken(*args: Any) -> Any:
        if (folder / "metrics.jsonl").stat().st_size:
            raise RuntimeError(f"the {part} broke")
        return real(*args)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("part", ["trainer", "engine"])
def test_a_run_goes_on_from_before_its_first_checkpoint(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calm: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    with monkeypatch.context() as patch:
        break_after_an_update(part, tmp_path, patch)
        with pytest.raises(ExceptionGroup) as caught:
            run.train(CFG, resolve("quick"), tmp_path, {})
    assert caught.group_contains(RuntimeError, match=f"the {part} broke")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0"]
    pool = Pool.open(str(tmp_path / "pool"))
    for number in pool.items():
        assert all(e.outcome.valid for e in pool.get(number)), "the fault became an outcome"

    evaluations: list[str] = []
    real = run.evaluation

    async def counted(this: run.Run, up: Any, title: str) -> Evaluation:
        evaluations.append(title)
        return await real(this, up, title)

    monkeypatch.setattr(run, "evaluation", counted)
    again = dataclasses.replace(CFG, resume=str(tmp_path))
    assert (played(again, tmp_path), history(tmp_path)) == calm
    assert evaluations == ["evaluation after"]


def test_an_engine_that_fails_once_costs_nothing_but_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    calm: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    real, failed = Runner._decode, []

    def broken(*args: Any) -> Any:
        if (tmp_path / "metrics.jsonl").stat().st_size and not failed:
            failed.append(True)
            jax.tree.map(lambda x: x.delete(), args[0]._pool)  # as a call that was given it does
            raise RuntimeError("the engine broke")
        return real(*args)

    monkeypatch.setattr(Runner, "_decode", broken)
    assert (played(CFG, tmp_path), history(tmp_path)) == calm
    restarts = [row["engine_restarts"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert restarts == [0, 1, 1]
    assert sum("the engine failed" in text for text in caplog.messages) == 1


def test_a_run_that_is_terminated_saves_its_last_update_and_evaluations_change_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calm: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    real, cfg = loop.update, dataclasses.replace(CFG, eval=dataclasses.replace(CFG.eval, every=1))
    told: list[int] = []

    def terminated(*args: Any) -> Any:
        if not told:
            told.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", terminated)
        with pytest.raises(KeyboardInterrupt):
            run.train(cfg, resolve("quick"), tmp_path, {})
    # Without the signal there would be none after the first update.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["0", "1"]
    file = tmp_path / "metrics.jsonl"
    [row] = read_rows(file)
    file.write_text(json.dumps(row | {"engine_restarts": 5}) + "\n")
    summary = played(dataclasses.replace(cfg, resume=str(tmp_path)), tmp_path)
    assert [row["engine_restarts"] for row in read_rows(file)] == [5, 5, 5], "all sessions'"
    rows = history(tmp_path)
    solved = [row.pop("eval") for row in rows]
    assert (summary, rows) == calm
    assert len(solved) == 3
    assert solved[-1] == summary["eval_after"]
