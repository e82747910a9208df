"""A training run's folder: what was asked for, whether it has ended, its weights as a model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from forge_jax.config import TrainConfig, UserError, load
from forge_jax.models.load import LoadedModel
from forge_jax.models.lora import merge, tuned
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.start import placed, prepared
from forge_jax.rl.state import create
from forge_jax.sharding import make_mesh, mesh_of


def is_run(folder: str) -> bool:
    """True for a folder that `experiments.train` wrote."""
    return (Path(folder) / "config.yaml").is_file() and (Path(folder) / "checkpoints").is_dir()


def run_of(folder: str) -> tuple[str, int | None] | None:
    """A run's folder with None, or with the step of the checkpoint that `folder` is,
    RUN_DIR/checkpoints/STEP; None where it is neither."""
    if is_run(folder):
        return folder, None
    path = Path(folder)
    if path.name.isdigit() and path.parent.name == "checkpoints" and is_run(str(path.parents[1])):
        return str(path.parents[1]), int(path.name)
    return None


def run_config(folder: str | Path) -> TrainConfig:
    """The configuration a run was started with. Raises UserError."""
    mapping = OmegaConf.to_container(OmegaConf.load(Path(folder) / "config.yaml"), resolve=True)
    return load(TrainConfig, mapping)  # type: ignore[arg-type]


def run_model(folder: str | Path, fresh: LoadedModel, step: int | None = None) -> LoadedModel:
    """`fresh`, what the run added, and the weights of its checkpoint of `step`, or of its newest,
    with adapters merged.

    Raises UserError.
    """
    cfg, mesh = run_config(folder), mesh_of(fresh.params) or make_mesh()
    fresh = prepared(cfg, fresh)
    base, trained = placed(cfg, fresh, mesh)
    with closing(Checkpoints(Path(folder) / "checkpoints")) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise UserError(f"model={folder}: the run has no checkpoint yet")
        state, _ = checkpoints.restore(step, create(trained, cfg.optim))
    params = merge(tuned(base, state.params), cfg.lora)
    return LoadedModel(cfg=fresh.cfg, params=params, chat=fresh.chat, name=f"{fresh.name}-{step}")


def check_same(folder: Path, cfg: TrainConfig) -> None:
    """Raises UserError, naming what differs, unless the run in `folder` is one of `cfg`."""
    there, here = (
        dict(leaves(asdict(replace(one, resume=None)))) for one in (run_config(folder), cfg)
    )
    different = [
        f"{key}={there.get(key)}, here {here.get(key)}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if different:
        raise UserError(
            f"{folder} holds a run of {'; '.join(different)}: give another folder, "
            f"or resume={folder} to go on with that one"
        )


def summary_of(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has taken all its steps; None before. Raises UserError."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary if summary["steps"] == run_config(folder).steps else None


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
