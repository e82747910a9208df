"""Names of models to models: a preset of `configs/model/`, a Hugging Face or a run's folder, a
GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from omegaconf import OmegaConf

from experiments.command import CONFIGS
from experiments.runs import run_config, run_model, run_of
from forge_jax.config import UserError, load
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.gguf import GgufFile, gguf_chat, gguf_config
from forge_jax.models.hf_chat import read_chat
from forge_jax.models.hf_config import read_config
from forge_jax.models.load import LoadedModel, build, load_folder, load_gguf
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
        raise UserError(
            f"model={name!r} is no folder, no GGUF file and none of {', '.join(presets())}"
        )
    mapping = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    read = load(Preset, mapping)  # type: ignore[arg-type]
    return read.config, Chat(tokenizer=ByteTokenizer(), format=built_in(read.chat))


def chat_of(name_or_path: str) -> tuple[Chat, str]:
    """Tokenizer and chat format of what `resolve` takes, and its name, without the weights.

    Raises UserError as `resolve`.
    """
    path = Path(name_or_path)
    if name_or_path in presets() or not name_or_path or not path.exists():
        return preset(name_or_path)[1], name_or_path
    if path.is_file():
        file = GgufFile(path.resolve())
        return gguf_chat(file, gguf_config(file).vocab), path.stem
    if (found := run_of(name_or_path)) is not None:
        return chat_of(run_config(found[0]).model)
    folder = path.resolve()
    return read_chat(folder, read_config(folder / "config.json").vocab), folder.name


def resolve(
    name_or_path: str, seed: int = 0, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> LoadedModel:
    """A preset initialised from `seed`, or the model of a folder or a GGUF file, in `dtype`, its
    parameters on one device or cut over `mesh` from the start.

    The folder is a Hugging Face one, that of a training run, whose newest checkpoint is taken, or
    RUN_DIR/checkpoints/STEP. Raises UserError on a name that is none of these, and on a folder of
    no such kind.
    """
    path = Path(name_or_path)
    if name_or_path in presets() or not name_or_path or not path.exists():
        cfg, chat = preset(name_or_path)
        return build(cfg, chat, seed, name_or_path, dtype, mesh)
    if path.is_file():
        return load_gguf(path, dtype, mesh)
    if (found := run_of(name_or_path)) is not None:
        folder, step = found
        run = run_config(folder)
        return run_model(folder, resolve(run.model, run.seed, dtype, mesh), step)
    if not (path / "config.json").is_file():
        raise UserError(f"model={name_or_path!r} holds neither a run nor a config.json")
    return load_folder(path, dtype, mesh)
