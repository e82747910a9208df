"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Adapters flow out to a folder that `peft` loads beside its base, and in from one. Values are moved
and transposed, never rounded. Every refusal names the file and what it is about.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from forge_jax.config import ADAPTABLE, LoraConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import Stored
from forge_jax.models.hf_config import FAMILIES
from forge_jax.models.hf_files import read_json, read_small, whole_folder
from forge_jax.models.lora import INPUTS, adapters_layout
from forge_jax.models.stored import Leaf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
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
    flat = {
        PREFIX + leaf.name(place): np.ascontiguousarray(leaf.outward(host[target][side][place]))
        for target, side, leaf in _leaves(cfg, lora)
        for place in leaf.places()
    }
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
    found = _leaves(cfg, lora)
    _check(folder / WEIGHTS, flat, [leaf for _, _, leaf in found], lora.rank)
    pairs: dict[str, dict[str, jax.Array]] = {target: {} for target in targets}
    for target, side, leaf in found:
        layers = [leaf.inward(flat[PREFIX + leaf.name(place)]) for place in leaf.places()]
        pairs[target][side] = jnp.asarray(np.stack(layers))
    return lora, {"layers": pairs}


def _check(file: Path, flat: Mapping[str, np.ndarray], found: Iterable[Leaf], rank: int) -> None:
    """Raises UserError naming a tensor that is missing, unexpected, or of another shape."""
    shapes = {PREFIX + leaf.name(at): leaf.stored_shape for leaf in found for at in leaf.places()}
    for name in sorted(shapes.keys() ^ flat.keys()):
        raise UserError(f"{file}: tensor {name} is {'unexpected' if name in flat else 'missing'}")
    for name, shape in shapes.items():
        if flat[name].shape != shape:
            raise UserError(
                f"{file}: tensor {name} has shape {flat[name].shape}, "
                f"the model and r={rank} say {shape}"
            )


def _leaves(cfg: ModelConfig, lora: LoraConfig) -> list[tuple[str, str, Leaf]]:
    """Every matrix of the adapters: its target, its side ("a" or "b"), and how it is stored."""
    stored, found = FAMILIES[cfg.family].layer, []
    for target, pair in adapters_layout(cfg, lora)["layers"].items():
        module = stored[target].name.removesuffix(".weight")
        for side, inputs in (("a", INPUTS[target]), ("b", 1)):
            name = f"{module}.lora_{side.upper()}.weight"
            leaf = Leaf(target, Stored(name, inputs=inputs), pair[side].shape, 1)
            found.append((target, side, leaf))
    return found
