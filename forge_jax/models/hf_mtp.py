"""Prediction modules beside a Hugging Face folder's weights, in a file of their own.

`transformers` does not look at `mtp.safetensors`; tensors have the names that DeepSeek-V3 gives
them, module k being layer L + k of a model of L layers. What was written is read bit for bit.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import Stored
from forge_jax.models.hf_config import FAMILIES
from forge_jax.models.hf_files import MODULES, read_small
from forge_jax.models.layout import modules_layout
from forge_jax.models.stored import Leaf, dtype_of

OWN = {
    "token_norm": Stored("enorm.weight"),
    "state_norm": Stored("hnorm.weight"),
    "project": Stored("eh_proj.weight", inputs=1),
    "norm": Stored("shared_head.norm.weight"),
}


def write_modules(
    folder: Path, cfg: ModelConfig, modules: Mapping[str, Any] | None, dtype: Any
) -> None:
    """Writes the modules of a model that has some, cast as its weights are."""
    if modules is None:
        return
    flat, family = {}, FAMILIES[cfg.family]
    for leaf, place, name in _tensors(cfg):
        tree = modules if leaf.ours in OWN else modules["block"]
        value = np.asarray(tree[leaf.ours][place])
        kind = dtype_of(leaf.ours, value.dtype, dtype, family)
        flat[name] = np.ascontiguousarray(leaf.outward(value.astype(kind)))
    safetensors.numpy.save_file(flat, folder / MODULES, metadata={"format": "pt"})


def with_modules(
    folder: Path, cfg: ModelConfig, params: dict[str, Any], dtype: Any
) -> tuple[ModelConfig, dict[str, Any]]:
    """A model with the modules that `folder` has beside it, in their dtype or cast to `dtype`
    (but for what the family keeps in fp32).

    Raises UserError naming file and tensor: one missing, unexpected, or of another shape.
    """
    file = folder / MODULES
    if not file.exists():
        return cfg, params
    flat = read_small(file)
    layers = {int(part) for name in flat for part in name.split(".")[2:3] if part.isdecimal()}
    cfg = dataclasses.replace(cfg, mtp=len(layers))
    wanted = {name: (leaf, place) for leaf, place, name in _tensors(cfg)}
    for name in sorted(wanted.keys() ^ flat.keys()):
        raise UserError(f"{file}: tensor {name} is {'unexpected' if name in flat else 'missing'}")
    modules: dict[str, Any] = {"block": {}}
    for name, (leaf, place) in wanted.items():
        value = flat[name]
        if value.shape != leaf.stored_shape:
            raise UserError(
                f"{file}: tensor {name} has shape {value.shape}, "
                f"the config says {leaf.stored_shape}"
            )
        tree = modules if leaf.ours in OWN else modules["block"]
        if leaf.ours not in tree:
            kind = dtype_of(leaf.ours, value.dtype, dtype, FAMILIES[cfg.family])
            tree[leaf.ours] = np.empty(leaf.shape, kind)
        tree[leaf.ours][place] = leaf.inward(value)
    made: dict[str, Any] = {
        name: jnp.asarray(tree) for name, tree in modules.items() if name != "block"
    }
    made["block"] = {name: jnp.asarray(value) for name, value in modules["block"].items()}
    return cfg, {**params, "mtp": made}


def _tensors(cfg: ModelConfig) -> Iterator[tuple[Leaf, tuple[int, ...], str]]:
    """Every tensor: the parameter, its place in the leading axes, and its name."""
    described, stored = modules_layout(cfg), FAMILIES[cfg.family].layer
    leaves = [Leaf(ours, OWN[ours], described[ours].shape, 1) for ours in OWN]
    for ours, param in described["block"].items():
        experts = "{expert}" in stored[ours].name
        leaves.append(Leaf(ours, stored[ours], param.shape, 2 if experts else 1))
    for leaf in leaves:
        for module, *expert in leaf.places():
            yield leaf, (module, *expert), leaf.name((cfg.layers + module, *expert))
