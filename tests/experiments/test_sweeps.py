"""Sweep and experiment files name only what exists, with values the configuration accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.command import CONFIGS
from forge_jax.config import TrainConfig, load
from forge_jax.rl.mixture import agents_of, lanes_of, sources_of

SWEEPS = sorted((Path(CONFIGS) / "sweeps").glob("*.yaml"))
EXPERIMENTS = sorted((Path(CONFIGS) / "experiment").glob("*.yaml"))
OBJECTIVES = sorted((Path(CONFIGS) / "objective").glob("*.yaml"))
TASKS = sorted((Path(CONFIGS) / "task").glob("*.yaml"))


def composed(*overrides: str) -> TrainConfig:
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        cfg = compose("train", overrides=list(overrides))
    mapping: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return load(TrainConfig, mapping)


def ends(parameter: dict[str, Any]) -> list[Any]:
    """Every listed value of a swept key, or the two ends of its range."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_sweep_keys_are_real(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    assert sweep["program"] == "experiments.train"
    for key, parameter in sweep["parameters"].items():
        for value in ends(parameter):
            composed(f"{key}={value}")  # refuses unknown keys and values that do not fit


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_sweeps_run_the_command_and_optimise_what_it_reports(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    fixed = [word for word in sweep["command"] if "=" in word]
    assert composed(*fixed).log.wandb == "online"
    assert sweep["metric"]["name"] in {"eval_before", "eval_after", "reward_last"}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_experiments_compose(path: Path) -> None:
    assert composed(f"+experiment={path.stem}") != composed()


def test_objectives_are_four_losses_with_one_credit() -> None:
    found = {path.stem: composed(f"+objective={path.stem}") for path in OBJECTIVES}
    assert len({cfg.loss for cfg in found.values()}) == len(found) == 4
    assert {cfg.credit for cfg in found.values()} == {composed().credit}
    assert composed("+experiment=losses", "sched.updates=16").sched.batch == 16  # a group each


def test_both_orders_train_on_as_many_items_of_each_domain() -> None:
    """Mixed or staged: all that differs is when."""
    consumed = []
    for order in ("mixed", "staged"):
        cfg = composed("+experiment=mixed", f"+order={order}")
        lanes, items = lanes_of(cfg), []
        for _ in range(cfg.steps):
            items.append(lanes.left)
            lanes.next_batch()
        assert cfg.eval.every is not None
        assert {stage.until for stage in cfg.stages or ()} <= {*range(0, 60, cfg.eval.every), None}
        consumed.append([sum(own) for own in zip(*items, strict=True)])
    assert consumed[0] == consumed[1] == [120, 120, 120]


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.stem)
def test_one_override_names_the_task(path: Path) -> None:
    cfg = composed(f"task={path.stem}")
    assert cfg.task == (path.stem if cfg.domains is None else None)
    agents_of(cfg), lanes_of(cfg), sources_of(cfg)  # refuse what does not go together
