"""A model ready to use: sizes, weights, and the chat that feeds it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from forge_jax.config import UserError
from forge_jax.models.chat import Chat
from forge_jax.models.config import ModelConfig
from forge_jax.models.gguf import GgufFile, gguf_chat, gguf_config, import_gguf
from forge_jax.models.hf import import_folder
from forge_jax.models.hf_chat import read_chat
from forge_jax.models.hf_config import read_config
from forge_jax.models.layout import init, layout
from forge_jax.sharding import put, shardings


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """Everything about one model."""

    cfg: ModelConfig
    params: dict[str, Any]  # layers stacked
    chat: Chat
    name: str


def load_folder(path: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> LoadedModel:
    """The model of a Hugging Face folder, in its own dtype or cast, its parameters on one device
    or cut over `mesh`. Raises UserError."""
    folder = Path(path).resolve()
    where = _where(read_config(folder / "config.json"), mesh)
    cfg, params = import_folder(folder, dtype, where)
    if mesh is not None and cfg.mtp:  # modules are in a file of their own, which is small
        params["mtp"] = put(params["mtp"], shardings(layout(cfg), mesh)["mtp"])
    return LoadedModel(cfg=cfg, params=params, chat=read_chat(folder, cfg.vocab), name=folder.name)


def load_gguf(path: str | Path, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> LoadedModel:
    """The model of a GGUF file. Raises UserError."""
    file = GgufFile(Path(path).resolve())
    cfg = gguf_config(file)
    chat = gguf_chat(file, cfg.vocab)
    params = import_gguf(file, cfg, dtype, _where(cfg, mesh))
    return LoadedModel(cfg=cfg, params=params, chat=chat, name=file.path.stem)


def build(
    cfg: ModelConfig,
    chat: Chat,
    seed: int,
    name: str,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """A fresh model. Raises UserError where the tokenizer has more ids than the model."""
    if chat.tokenizer.vocab_size > cfg.vocab:
        raise UserError(
            f"vocab={cfg.vocab} is less than the tokenizer's {chat.tokenizer.vocab_size}"
        )
    params = init(cfg, jax.random.key(seed), dtype, _where(cfg, mesh))
    return LoadedModel(cfg=cfg, params=params, chat=chat, name=name)


def _where(cfg: ModelConfig, mesh: Mesh | None) -> Any:
    return None if mesh is None else shardings(layout(cfg), mesh)
