"""Writes a model as a Hugging Face folder: a preset, another folder, or what a run has trained.

    python -m experiments.export model=NAME_OR_DIR_OR_RUN_DIR out=DIR [adapter=DIR]
        [dtype=bfloat16] [mesh.fsdp=4]

Of a run the newest checkpoint is taken, its adapters merged; `adapter` is a folder of PEFT to
merge into the model. Prediction modules are written beside the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import MeshConfig, UserError, check, load
from forge_jax.models.hf import export_folder
from forge_jax.models.hf_lora import import_adapter
from forge_jax.models.lora import adapters_layout, merge, tuned
from forge_jax.sharding import mesh_from, put, shardings

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """One export; see `configs/export.yaml`."""

    model: str
    out: str
    adapter: str | None = None
    dtype: str = "float32"
    seed: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)  # that the model is read onto

    def __post_init__(self) -> None:
        check(self.dtype in DTYPES, f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")


@command("export")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return export(load(ExportConfig, mapping))


def export(cfg: ExportConfig) -> dict[str, Any]:
    """The command's result. Raises UserError for what cannot be read or written."""
    if not Path(cfg.out).absolute().parent.is_dir():
        raise UserError(f"out={cfg.out}: no such folder to write it in")
    mesh = mesh_from(cfg.mesh)
    model = resolve(cfg.model, cfg.seed, mesh=mesh)
    params = model.params
    if cfg.adapter is not None:
        lora, adapters = import_adapter(cfg.adapter, model.cfg)
        adapters = put(adapters, shardings(adapters_layout(model.cfg, lora), mesh))
        params = merge(tuned(params, adapters), lora)
    chat = model.chat
    export_folder(
        cfg.out, model.cfg, params, chat.tokenizer, chat.format, dtype=jnp.dtype(cfg.dtype)
    )
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"model": model.name, "out": cfg.out, "dtype": cfg.dtype, "parameters": weights}


if __name__ == "__main__":
    main()
