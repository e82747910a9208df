"""Qwen3, dense (arXiv 2505.09388): an RMS norm on every query and key head."""

from typing import Any

from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import ATTENTION, DENSE, QK_NORM, Family
from forge_jax.models.families.keys import Keys


def attention(keys: Keys) -> dict[str, Any]:
    """What Qwen3's dense and sparse models say of attention."""
    return {
        "kv_heads": keys.of("num_key_value_heads", int),
        "head_dim": keys.of("head_dim", int),
        "tied": keys.of("tie_word_embeddings", bool, False),
        "rope_theta": keys.rope().theta,
        "qk_norm": "head",
    }


def attention_keys(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `attention`, and what transformers expects beside it."""
    return {
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": cfg.layers,
    }


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    ffn="intermediate_size",
    plain={},
    read=attention,
    write=attention_keys,
    layer={**ATTENTION, **QK_NORM, **DENSE},
)
