"""Names of models to models: a preset of `configs/model/`, a Hugging Face or a run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import OmegaConf

from experiments.command import CONFIGS
from experiments.runs import is_run, run_config, run_model
from forge_jax.config import UserError, load
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.load import LoadedModel, build, load_folder
from forge_jax.models.tokenizer import ByteTokenizer

PRESETS = Path(CONFIGS) / "model"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One file of `configs/model/`; its tokenizer is bytes."""

    config: ModelConfig
    chat: str  # a packaged chat format


def presets() -> list[str]:
    """Names of the presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def preset(name: str) -> tuple[ModelConfig, Chat]:
    """Sizes and chat of a preset, without weights. Raises UserError listing the presets."""
    if name not in presets():
        raise UserError(f"model={name!r} is neither a folder nor one of {', '.join(presets())}")
    mapping = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    read = load(Preset, mapping)  # type: ignore[arg-type]
    return read.config, Chat(tokenizer=ByteTokenizer(), format=built_in(read.chat))


def resolve(name_or_dir: str, seed: int = 0, dtype: Any = jnp.float32) -> LoadedModel:
    """A preset initialised from `seed`, or the model of a folder, in `dtype`.

    The folder is a Hugging Face one, or that of a training run, whose newest checkpoint
    is taken. Raises UserError on a name that is neither, and on a folder of neither kind.
    """
    if name_or_dir and name_or_dir not in presets() and Path(name_or_dir).is_dir():
        if is_run(name_or_dir):
            return run_model(name_or_dir, resolve(run_config(name_or_dir).model, seed, dtype))
        if not (Path(name_or_dir) / "config.json").is_file():
            raise UserError(f"model={name_or_dir!r} holds neither a run nor a config.json")
        found = load_folder(name_or_dir)
        params = jax.tree.map(lambda x: x.astype(dtype), found.params)
        return LoadedModel(cfg=found.cfg, params=params, chat=found.chat, name=found.name)
    cfg, chat = preset(name_or_dir)
    return build(cfg, chat, seed, name_or_dir, dtype)
