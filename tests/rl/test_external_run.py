"""A run that an engine elsewhere samples for is the run that our own engine samples for."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from small_run import config
from stand_in_engines import standing_apart

from experiments import command
from experiments.chaos import timeless
from experiments.models import resolve
from forge_jax.config import (
    ExternalConfig,
    RolloutConfig,
    TrainConfig,
    UserError,
    WarmConfig,
    load,
)
from forge_jax.rl import run
from forge_jax.rl.report import read_rows

ROLLOUT = RolloutConfig(context=64)
BEHIND = RolloutConfig(context=64, slots=16, deterministic=True)
SCHED: dict[str, Any] = {"in_flight": 2, "window": 0, "episode_seconds": 60.0}
CFG = dataclasses.replace(
    config(warm=60, synchronous=True, hold_updates=1, **SCHED), rollout=ROLLOUT
)


def history(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [timeless(row) for row in rows]


@pytest.mark.slow
def test_a_synchronous_run_is_the_same(
    tmp_path: Path, calm: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    with standing_apart(resolve("quick"), BEHIND) as url:
        cfg = dataclasses.replace(CFG, engine="vllm", engine_url=url)
        summary = run.train(cfg, resolve("quick"), tmp_path, {})
    rows = history(tmp_path)
    trained = [row for row in rows if row["stepped"]]
    assert trained
    for row in trained:  # held weights are late by just so many updates, once there are as many
        assert row["age_share"] == {str(min(row["step"] - 1, 1)): 1.0}
    assert rows == calm[1]
    assert summary["eval_after"] == calm[0]["eval_after"]
    weights = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert weights == ["v00000001", "v00000003"]  # the last one comes at once


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows of the run with our own engine."""
    folder = tmp_path_factory.mktemp("own")
    cfg = dataclasses.replace(CFG, rollout=BEHIND)
    return run.train(cfg, resolve("quick"), folder, {}), history(folder)


def test_no_engine_is_the_callers_mistake(tmp_path: Path) -> None:
    cfg = dataclasses.replace(
        CFG, warm=WarmConfig(steps=0, gate=0.0), engine="vllm", engine_url="http://127.0.0.1:9"
    )
    with pytest.raises(UserError, match=r"engine_url=http://127\.0\.0\.1:9: no engine"):
        run.train(cfg, resolve("quick"), tmp_path, {})


@pytest.mark.parametrize(
    "overrides", [(), ("engine=sglang", "engine_url=http://h", "external.update=wait")]
)
def test_the_commands_configuration_is_read(overrides: tuple[str, ...]) -> None:
    with initialize_config_dir(command.CONFIGS, version_base="1.3"):
        said = compose("train", overrides=["logging=none", *overrides])
    mapping = OmegaConf.to_container(said, resolve=True)
    cfg = load(TrainConfig, mapping)  # type: ignore[arg-type]
    assert cfg.external == ExternalConfig(update="wait" if overrides else "recompute")
