"""Trains an agent: warm start on scripted play, then RL through the gateway.

    python -m experiments.train [task=hop|reasoning:gcd] [resume=RUN_DIR] [key=value ...]

Where its folder (hydra.run.dir, or a job's in a multirun) holds a run of the same settings already,
that one goes on, or nothing is done if it has ended. Writes config.yaml, metrics.jsonl,
checkpoints/, pool/ (unless `pool` is elsewhere), curves.png, forest.png and summary.json to the
run folder; the last line of stdout is the summary.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from os.path import abspath
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.command import CONFIGS, command, complaining
from experiments.models import resolve
from experiments.runs import check_same, summary_of
from forge_jax.config import DTYPES, TrainConfig, UserError, load
from forge_jax.rl.forward import tiled
from forge_jax.rl.run import train
from forge_jax.rl.writing import write_whole
from forge_jax.sharding import mesh_from

# What a run is: a checkpoint of one does not continue another, and its two evaluations are
# of the same episodes.
FIXED = ("model", "task", "domains", "stages", "seed", "eval", "lora", "agent", "tools", "pool")


@command("train", plain=("model", "pool"), refined=("task",))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if mapping["resume"] is not None:
        mapping = continued(Path(mapping["resume"]), list(HydraConfig.get().overrides.task))
    elif mapping["pool"] is not None:
        mapping |= {"pool": lasting(str(mapping["pool"]))}
    check_sources(mapping)
    cfg = load(TrainConfig, mapping)
    if cfg.resume is None and (folder / "config.yaml").exists():
        check_same(folder, cfg)
        ended = summary_of(folder)
        if ended is not None:
            print(f"{folder}: has ended already", file=sys.stderr)
            return ended
    cfg = replace(cfg, pack=tiled(cfg.pack, cfg.attention, cfg.dtype))
    if cfg.resume is not None and Path(cfg.resume).resolve() != folder.resolve():
        raise UserError(f"resume={cfg.resume} goes on in its own folder, not in {folder}")
    model = resolve(cfg.model, cfg.seed, mesh=mesh_from(cfg.mesh))
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(mapping)))
    with complaining(f"to go on: python -m experiments.train resume={folder}"):
        return train(cfg, model, folder, mapping)


def check_sources(mapping: Mapping[str, Any]) -> None:
    """Raises UserError, under their own names, for keys that give others their value."""
    steps, dtype = mapping["steps"], mapping["dtype"]
    if type(steps) is int and steps < 0:  # optim.decay_steps
        raise UserError(f"{steps=} must be >= 0")
    if dtype not in DTYPES:  # rollout.dtype
        raise UserError(f"{dtype=} must be one of {DTYPES}")


def lasting(location: str) -> str:
    """A pool's location that means the same wherever the run is resumed from."""
    return location if "://" in location or location.startswith("{") else abspath(location)


def continued(run: Path, overrides: list[str]) -> dict[str, Any]:
    """The configuration of `run` with the overrides of this call on top.

    Raises UserError if `run` is no run folder or an override would make another run.
    """
    saved = run / "config.yaml"
    if not saved.is_file():
        raise UserError(f"resume={run}: no config.yaml there")
    for override in (o.removeprefix("++plain.") for o in overrides):
        key = override.split("=")[0]
        if key.split(".")[0] in FIXED or not key[0].isalpha():
            raise UserError(f"{override}: a resumed run keeps its {', '.join(FIXED)} and its keys")
    preset, values = OmegaConf.create(), []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "mesh":
            preset = OmegaConf.create({"mesh": mesh_preset(value)})
        elif key != "logging":  # which Hydra has set up already, and no run keeps
            values.append(override)
    merged = OmegaConf.merge(OmegaConf.load(saved), preset, OmegaConf.from_dotlist(values))
    assert isinstance(merged, DictConfig)
    return OmegaConf.to_container(merged, resolve=True)  # type: ignore[return-value]


def mesh_preset(name: str) -> DictConfig:
    """A file of `configs/mesh/` on top of those it names. Raises UserError listing the files."""
    files = {file.stem: file for file in (Path(CONFIGS) / "mesh").glob("*.yaml")}
    if name not in files:
        raise UserError(f"mesh={name} is none of {', '.join(sorted(files))}")
    own = OmegaConf.load(files[name])
    assert isinstance(own, DictConfig)
    below = [other for other in own.pop("defaults", []) if other != "_self_"]
    merged = OmegaConf.merge(*map(mesh_preset, below), own)
    assert isinstance(merged, DictConfig)
    return merged


if __name__ == "__main__":
    main()
