"""`config.json` of every family, to and from `ModelConfig`.

What the transformer does not compute is refused by key and value, never ignored.
"""

import dataclasses
from pathlib import Path
from typing import Any

from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import PLAIN, SIZES, Family
from forge_jax.models.families.keys import Keys
from forge_jax.models.families.llama import LLAMA
from forge_jax.models.families.minimax_m2 import MINIMAX_M2
from forge_jax.models.families.qwen3 import QWEN3
from forge_jax.models.families.qwen3_moe import QWEN3_MOE
from forge_jax.models.hf_files import read_json

# By `ModelConfig.family`.
FAMILIES: dict[str, Family] = {
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "llama": LLAMA,
    "minimax_m2": MINIMAX_M2,
}


def read_config(file: Path) -> ModelConfig:
    """Raises UserError naming the file, the key and the value it cannot serve."""
    return _parse(Keys(file, read_json(file)))


def weight_blocks(file: Path) -> tuple[int, int] | None:
    """Rows and columns of the blocks by which a `config.json` says that weights are scaled; None
    where they are not. Raises UserError for any quantisation but fp8 in blocks.
    """
    said = read_json(file).get("quantization_config")
    if said is None:
        return None
    blocks = said.get("weight_block_size") if isinstance(said, dict) else None
    if (
        not isinstance(blocks, list)
        or said.get("quant_method") != "fp8"
        or [type(side) for side in blocks] != [int, int]
        or min(blocks) < 1
    ):
        known = "quant_method 'fp8' with a weight_block_size [rows, columns]"
        raise UserError(f"{file}: quantization_config={said!r} is unsupported, only {known}")
    return blocks[0], blocks[1]


def config_json(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """What `config.json` says of this model, with weights of `dtype`.

    Raises UserError where its family's folders cannot say something of it.
    """
    family = FAMILIES[cfg.family]
    said = {
        "architectures": [family.architecture],
        "model_type": family.model_types[0],
        **{key: kind(getattr(cfg, ours)) for ours, (key, kind) in SIZES.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": cfg.init_std,
        "use_cache": True,
        "torch_dtype": dtype,
        **family.write(cfg),
        family.ffn: cfg.ffn,
    }
    understood = _parse(Keys(Path("config.json"), said))
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != getattr(understood, field.name):
            raise UserError(
                f"{field.name}={value!r} has no place in a folder of family={cfg.family!r}"
            )
    return said


def _parse(keys: Keys) -> ModelConfig:
    name = _family(keys)
    family = FAMILIES[name]
    keys.only("model_type", *family.model_types)
    for key, allowed in (PLAIN | dict(family.plain)).items():
        keys.only(key, *allowed)
    kinds = keys.raw.get("layer_types") or []
    if set(kinds) - {"full_attention"}:
        raise UserError(f"{keys.file}: layer_types={kinds!r} is unsupported, only 'full_attention'")
    fields = {ours: keys.of(key, kind) for ours, (key, kind) in SIZES.items()}
    fields["ffn"] = keys.of(family.ffn, int)
    fields["init_std"] = keys.of("initializer_range", float, ModelConfig.init_std)
    try:
        return ModelConfig(family=name, **fields, **family.read(keys))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{keys.file}: {error}") from error


def _family(keys: Keys) -> str:
    names = keys.raw.get("architectures")
    for name, family in FAMILIES.items():
        if names == [family.architecture]:
            return name
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise UserError(f"{keys.file}: architectures={names!r} is unsupported, only one of {known}")
