"""A training run's folder as a model: its configuration's sizes, its newest weights."""

from contextlib import closing
from pathlib import Path

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


def run_config(folder: str | Path) -> TrainConfig:
    """The configuration a run was started with. Raises UserError."""
    mapping = OmegaConf.to_container(OmegaConf.load(Path(folder) / "config.yaml"), resolve=True)
    return load(TrainConfig, mapping)  # type: ignore[arg-type]


def run_model(folder: str | Path, fresh: LoadedModel) -> LoadedModel:
    """`fresh`, what the run added, and the weights of its newest checkpoint, with adapters merged.

    Raises UserError.
    """
    cfg, mesh = run_config(folder), mesh_of(fresh.params) or make_mesh()
    fresh = prepared(cfg, fresh)
    base, trained = placed(cfg, fresh, mesh)
    with closing(Checkpoints(Path(folder) / "checkpoints")) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"model={folder}: the run has no checkpoint yet")
        state, _ = checkpoints.restore(step, create(trained, cfg.optim))
    params = merge(tuned(base, state.params), cfg.lora)
    return LoadedModel(cfg=fresh.cfg, params=params, chat=fresh.chat, name=f"{fresh.name}-{step}")
