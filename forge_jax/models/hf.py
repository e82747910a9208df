"""Parameters under Hugging Face names, in and out of folders.

A folder (`config.json`, safetensors, perhaps in shards) flows in and becomes a config
and parameters; the same flow out. Values are moved and transposed, never rounded: what
was exported is imported bit for bit. Every refusal names the file and the tensor.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from forge_jax.config import UserError
from forge_jax.models.chat import ChatFormat
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf_chat import write_chat
from forge_jax.models.hf_config import config_json, read_config
from forge_jax.models.hf_files import WEIGHTS, read_tensor, tensor_files, whole_folder
from forge_jax.models.layout import layout
from forge_jax.models.tokenizer import Tokenizer

# Our name -> (their name, number of input axes of the matrix). They store linear maps as
# [out, in]; 0 input axes: stored as it is.
TOP = {
    "embed": ("model.embed_tokens.weight", 0),
    "norm": ("model.norm.weight", 0),
    "unembed": ("lm_head.weight", 1),
}
LAYER = {
    "input_norm": ("input_layernorm.weight", 0),
    "q": ("self_attn.q_proj.weight", 1),
    "k": ("self_attn.k_proj.weight", 1),
    "v": ("self_attn.v_proj.weight", 1),
    "q_norm": ("self_attn.q_norm.weight", 0),
    "k_norm": ("self_attn.k_norm.weight", 0),
    "o": ("self_attn.o_proj.weight", 2),
    "post_norm": ("post_attention_layernorm.weight", 0),
    "gate": ("mlp.gate_proj.weight", 1),
    "up": ("mlp.up_proj.weight", 1),
    "down": ("mlp.down_proj.weight", 1),
}


class _Entry(NamedTuple):
    """One stored tensor: where it is in our tree, and how its axes split."""

    name: str  # theirs
    ours: str
    layer: int | None  # None: outside the layers
    shape: tuple[int, ...]  # ours, without the layer axis
    inputs: int

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in a file."""
        if self.inputs == 0:
            return self.shape
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])

    def outward(self, value: np.ndarray) -> np.ndarray:
        """Our layout to theirs."""
        stored = value.reshape(self.stored[::-1]).T if self.inputs else value
        return np.ascontiguousarray(stored)

    def inward(self, value: np.ndarray) -> np.ndarray:
        """Their layout to ours."""
        return value.T.reshape(self.shape) if self.inputs else value


def flat_names(cfg: ModelConfig, tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A params-shaped tree (weights, gradients) under their names in their layout.

    Layers may be stacked or unstacked. Tied models have no `lm_head.weight`.
    """
    host = jax.tree.map(np.asarray, tree)

    def value(entry: _Entry) -> np.ndarray:
        if entry.layer is None:
            return host[entry.ours]
        layers = host["layers"]
        stacked = isinstance(layers, dict)
        return layers[entry.ours][entry.layer] if stacked else layers[entry.layer][entry.ours]

    return {entry.name: entry.outward(value(entry)) for entry in _entries(cfg)}


def import_folder(path: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and parameters of a Hugging Face folder, in the dtype they are stored in.

    Raises UserError naming file and tensor: files missing or corrupt, an architecture or
    feature that is not this family's, tensors missing, unexpected, or of another shape.
    """
    folder = Path(path)
    cfg = read_config(folder / "config.json")
    files = tensor_files(folder)
    entries = _entries(cfg)
    _check_names(files, entries, cfg, folder)
    flat = {e.name: e.inward(read_tensor(files[e.name], e.name, e.stored)) for e in entries}
    _check_dtypes(flat, files)
    if cfg.tied and "lm_head.weight" in files:
        _check_tie(flat["model.embed_tokens.weight"], files["lm_head.weight"])
    params: dict[str, Any] = {
        e.ours: jnp.asarray(flat.pop(e.name)) for e in entries if e.layer is None
    }
    params["layers"] = {
        ours: jnp.asarray(np.stack([flat.pop(_in_layer(i, name)) for i in range(cfg.layers)]))
        for ours, (name, _) in LAYER.items()
    }
    return cfg, params


def export_folder(
    path: str | Path,
    cfg: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    chat_format: ChatFormat | None = None,
) -> None:
    """Writes a folder that `import_folder` and `transformers` load, whole or not at all.

    Raises UserError where `path` holds something other than an earlier export.
    """
    flat = flat_names(cfg, params)
    config = config_json(cfg, flat["model.embed_tokens.weight"].dtype.name)
    with whole_folder(Path(path)) as folder:
        if tokenizer is not None:
            config |= write_chat(folder, tokenizer, chat_format)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(flat, folder / WEIGHTS, metadata={"format": "pt"})


def _entries(cfg: ModelConfig) -> list[_Entry]:
    described = layout(cfg)
    top = [
        _Entry(name, ours, None, described[ours].shape, inputs)
        for ours, (name, inputs) in TOP.items()
        if ours in described
    ]
    return top + [
        _Entry(_in_layer(i, name), ours, i, described["layers"][ours].shape[1:], inputs)
        for i in range(cfg.layers)
        for ours, (name, inputs) in LAYER.items()
    ]


def _in_layer(i: int, name: str) -> str:
    return f"model.layers.{i}.{name}"


def _check_names(
    files: Mapping[str, Path], entries: list[_Entry], cfg: ModelConfig, folder: Path
) -> None:
    wanted = {e.name for e in entries}
    for name in sorted(wanted - set(files)):
        raise UserError(f"{folder}: tensor {name} is missing")
    # A tied model may store its output matrix too; it is then checked against the embedding.
    for name in sorted(set(files) - wanted - ({"lm_head.weight"} if cfg.tied else set())):
        raise UserError(f"{files[name]}: unexpected tensor {name}")


def _check_dtypes(flat: Mapping[str, np.ndarray], files: Mapping[str, Path]) -> None:
    first = next(iter(flat.values())).dtype
    for name, value in flat.items():
        if value.dtype != first:
            raise UserError(f"{files[name]}: tensor {name} is {value.dtype}, others are {first}")
    if first == np.float64 and jnp.result_type(float) != np.float64:
        raise UserError(f"{next(iter(files.values()))}: float64 weights need jax_enable_x64")


def _check_tie(embed: np.ndarray, file: Path) -> None:
    head = read_tensor(file, "lm_head.weight", embed.shape)
    if not np.array_equal(head, embed):
        raise UserError(
            f"{file}: tensor lm_head.weight differs from the embedding, though "
            "tie_word_embeddings=True"
        )
