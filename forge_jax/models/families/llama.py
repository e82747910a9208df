"""Llama 3.x (arXiv 2407.21783) and models of its architecture, such as SmolLM2: no norms of
queries and keys, rotary frequencies that may be stretched."""

from typing import Any

from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import ATTENTION, DENSE, Family
from forge_jax.models.families.keys import LLAMA3, Keys


def _read(keys: Keys) -> dict[str, Any]:
    heads = keys.of("num_attention_heads", int)
    rope = keys.rope(scaled=True)
    return {
        "kv_heads": keys.of("num_key_value_heads", int, heads),
        "head_dim": keys.of("head_dim", int, keys.of("hidden_size", int) // heads),
        "tied": keys.of("tie_word_embeddings", bool, False),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "qk_norm": "none",
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    scaling = cfg.rope_scaling
    return {
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3"} | {k: getattr(scaling, f) for f, (k, _) in LLAMA3.items()},
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    }


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_types=("llama",),
    ffn="intermediate_size",
    plain={"sliding_window": (None,)},
    read=_read,
    write=_write,
    layer={**ATTENTION, **DENSE},
)
