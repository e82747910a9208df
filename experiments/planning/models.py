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
    path = Path(name_or_dir)
    if name_or_dir in presets() or not name_or_dir or not path.exists():
        return preset(name_or_dir)[0]
    if not (path / "config.json").is_file():
        raise UserError(f"model={name_or_dir!r} is no folder with a config.json")
    return read_config(path / "config.json")
