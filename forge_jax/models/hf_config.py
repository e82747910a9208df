"""`config.json` of the Qwen3 family, to and from `ModelConfig`.

What the transformer does not compute is refused by key and value, never ignored.
"""

from pathlib import Path
from typing import Any

from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf_files import read_json

ARCHITECTURE = "Qwen3ForCausalLM"
# Our field -> (their key, its type).
SIZES: dict[str, tuple[str, type]] = {
    "vocab": ("vocab_size", int),
    "embed": ("hidden_size", int),
    "layers": ("num_hidden_layers", int),
    "heads": ("num_attention_heads", int),
    "kv_heads": ("num_key_value_heads", int),
    "head_dim": ("head_dim", int),
    "ffn": ("intermediate_size", int),
    "norm_eps": ("rms_norm_eps", float),
    "tied": ("tie_word_embeddings", bool),
    "max_context": ("max_position_embeddings", int),
}
# Features the transformer lacks: the only values under which it computes the same function.
PLAIN: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


def read_config(file: Path) -> ModelConfig:
    """Raises UserError naming the file, the key and the value it cannot serve."""
    raw = read_json(file)
    names = raw.get("architectures")
    if names != [ARCHITECTURE]:
        raise UserError(f"{file}: architectures={names!r} is unsupported, only [{ARCHITECTURE!r}]")
    for key, allowed in PLAIN.items():
        if key in raw and raw[key] not in allowed:
            raise UserError(f"{file}: {key}={raw[key]!r} is unsupported, only {allowed[0]!r}")
    kinds = raw.get("layer_types") or []
    if set(kinds) - {"full_attention"}:
        raise UserError(f"{file}: layer_types={kinds!r} is unsupported, only 'full_attention'")
    fields = {ours: _typed(raw, key, kind, file) for ours, (key, kind) in SIZES.items()}
    if "initializer_range" in raw:
        fields["init_std"] = _typed(raw, "initializer_range", float, file)
    try:
        return ModelConfig(rope_theta=_rope_theta(raw, file), **fields)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error


def config_json(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """What `config.json` says of this model, with weights of `dtype`."""
    sizes = {key: kind(getattr(cfg, ours)) for ours, (key, kind) in SIZES.items()}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **sizes,
        "initializer_range": cfg.init_std,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": cfg.layers,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _rope_theta(raw: dict[str, Any], file: Path) -> float:
    """The rotary base, from either generation of the format; scaled variants are refused."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = dict(raw.get(key) or {})
    base = rope.pop("rope_theta", raw.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind != "default" or rope:
        raise UserError(f"{file}: {key}={raw[key]!r} is unsupported, only the default")
    return _typed({"rope_theta": base}, "rope_theta", float, file)


def _typed(raw: dict[str, Any], key: str, kind: type, file: Path) -> Any:
    value = raw.get(key)
    if value is None:
        raise UserError(f"{file}: missing {key}")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{file}: {key}={value!r} must be {kind.__name__}")
    return value
