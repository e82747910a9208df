"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Adapters flow out to a folder that `peft` loads beside its base, and in from one. Values are moved
and transposed, never rounded. Every refusal names the file and what it is about.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from forge_jax.config import ADAPTABLE, LoraConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf_config import FAMILIES
from forge_jax.models.hf_files import read_json, read_small, whole_folder
from forge_jax.models.lora import INPUTS, adapters_layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Variants of the method: the only values under which it is this one.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian"),  # others alter the base
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


class _Entry(NamedTuple):
    """One stored matrix [out, in]."""

    name: str
    target: str
    side: str  # "a" or "b"
    layer: int
    shape: tuple[int, ...]  # ours, without the layer axis
    inputs: int

    def outward(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.reshape(*self._flat).T)

    def inward(self, value: np.ndarray) -> np.ndarray:
        return value.T.reshape(self.shape)

    @property
    def stored(self) -> tuple[int, int]:
        rows, columns = self._flat
        return columns, rows

    @property
    def _flat(self) -> tuple[int, int]:
        size = int(np.prod(self.shape[: self.inputs]))
        return size, int(np.prod(self.shape)) // size


def export_adapter(
    path: str | Path, cfg: ModelConfig, adapters: Mapping[str, Any], lora: LoraConfig, base: str
) -> None:
    """Writes a folder that `import_adapter` and `peft` load, whole or not at all.

    `base` is the folder or the name of the model that the adapters are for. Raises UserError
    where `path` holds something other than an earlier adapter.
    """
    stored = FAMILIES[cfg.family].layer
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [stored[name].name.split(".")[-2] for name in lora.targets],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    host = {n: {k: np.asarray(v) for k, v in ab.items()} for n, ab in adapters["layers"].items()}
    flat = {e.name: e.outward(host[e.target][e.side][e.layer]) for e in _entries(cfg, lora)}
    with whole_folder(Path(path), {CONFIG, WEIGHTS}) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(flat, folder / WEIGHTS, metadata={"format": "pt"})


def import_adapter(path: str | Path, cfg: ModelConfig) -> tuple[LoraConfig, dict[str, Any]]:
    """Configuration and adapters of a folder of PEFT, for a model of the sizes `cfg`.

    Raises UserError naming file and key or tensor for variants of the method, other models'
    adapters, and matrices outside the layers' linear maps.
    """
    folder = Path(path)
    said = read_json(folder / CONFIG)
    for key, allowed in PLAIN.items():
        if said.get(key, allowed[0]) not in allowed:
            raise UserError(f"{folder / CONFIG}: {key}={said[key]!r} is unsupported")
    flat = read_small(folder / WEIGHTS)
    stored = FAMILIES[cfg.family].layer
    modules = {name.rsplit(".", 2)[0].split(".", 5)[-1] for name in flat}
    targets = tuple(t for t in ADAPTABLE if stored[t].name.removesuffix(".weight") in modules)
    try:
        lora = LoraConfig(rank=said["r"], alpha=float(said["lora_alpha"]), targets=targets)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    entries = {entry.name: entry for entry in _entries(cfg, lora)}
    for name in sorted(entries.keys() ^ flat.keys()):
        found = "unexpected" if name in flat else "missing"
        raise UserError(f"{folder / WEIGHTS}: tensor {name} is {found}")
    pairs: dict[str, dict[str, list[np.ndarray]]] = {t: {"a": [], "b": []} for t in targets}
    for name, entry in entries.items():
        value = flat[name]
        if value.shape != entry.stored:
            raise UserError(
                f"{folder / WEIGHTS}: tensor {name} has shape {value.shape}, "
                f"the model and r={lora.rank} say {entry.stored}"
            )
        pairs[entry.target][entry.side].append(entry.inward(value))
    return lora, {
        "layers": {t: {k: jnp.asarray(np.stack(v)) for k, v in p.items()} for t, p in pairs.items()}
    }


def _entries(cfg: ModelConfig, lora: LoraConfig) -> Iterator[_Entry]:
    """Every stored matrix, each target's in order of the layers."""
    stored, described = FAMILIES[cfg.family].layer, adapters_layout(cfg, lora)["layers"]
    for target, pair in described.items():
        module = stored[target].name.removesuffix(".weight")
        for side, letter, inputs in (("a", "A", INPUTS[target]), ("b", "B", 1)):
            for i in range(cfg.layers):
                name = f"base_model.model.model.layers.{i}.{module}.lora_{letter}.weight"
                yield _Entry(name, target, side, i, pair[side].shape[1:], inputs)
