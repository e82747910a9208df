"""A model ready to use: sizes, weights, and the chat that feeds it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forge_jax.config import UserError
from forge_jax.models.chat import Chat
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import import_folder
from forge_jax.models.hf_chat import read_chat
from forge_jax.models.layout import init


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """Everything about one model."""

    cfg: ModelConfig
    params: dict[str, Any]  # layers stacked
    chat: Chat
    name: str


def load_folder(path: str | Path) -> LoadedModel:
    """The model of a Hugging Face folder, in its own dtype. Raises UserError."""
    folder = Path(path).resolve()
    cfg, params = import_folder(folder)
    return LoadedModel(cfg=cfg, params=params, chat=read_chat(folder, cfg.vocab), name=folder.name)


def build(
    cfg: ModelConfig, chat: Chat, seed: int, name: str, dtype: Any = jnp.float32
) -> LoadedModel:
    """A fresh model. Raises UserError where the tokenizer has more ids than the model."""
    if chat.tokenizer.vocab_size > cfg.vocab:
        raise UserError(
            f"vocab={cfg.vocab} is less than the tokenizer's {chat.tokenizer.vocab_size}"
        )
    params = init(cfg, jax.random.key(seed), dtype)
    return LoadedModel(cfg=cfg, params=params, chat=chat, name=name)
