"""Sizes of a model, without its weights."""

from pathlib import Path

from experiments.models import preset, presets
from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf_config import read_config


def sizes(name_or_dir: str) -> ModelConfig:
    """Of a preset, or of a Hugging Face folder, where a config.json is enough.

    Raises UserError on a name that is neither.
    """
    if name_or_dir not in presets() and Path(name_or_dir).is_dir():
        file = Path(name_or_dir) / "config.json"
        if not file.is_file():
            raise UserError(f"model={name_or_dir!r} holds no config.json")
        return read_config(file)
    return preset(name_or_dir)[0]
