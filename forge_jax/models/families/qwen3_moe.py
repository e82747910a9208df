"""Qwen3 with experts in every layer (arXiv 2505.09388): softmax scores, no shared experts."""

from typing import Any

from forge_jax.models.config import ModelConfig
from forge_jax.models.families import qwen3
from forge_jax.models.families.family import ATTENTION, QK_NORM, Family, Stored
from forge_jax.models.families.keys import Keys


def _read(keys: Keys) -> dict[str, Any]:
    # transformers 5 writes the number of experts under another key than the published folders.
    count = "num_experts" if "num_experts" in keys.raw else "num_local_experts"
    return {
        **qwen3.attention(keys),
        "experts": keys.of(count, int),
        "experts_per_token": keys.of("num_experts_per_tok", int),
        "norm_top": keys.of("norm_topk_prob", bool, False),
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **qwen3.attention_keys(cfg),
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "norm_topk_prob": cfg.norm_top,
        "intermediate_size": cfg.ffn,  # of dense layers, which there are not
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    ffn="moe_intermediate_size",
    plain={
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "shared_expert_intermediate_size": (0, None),
        "scoring_func": ("softmax",),
    },
    read=_read,
    write=_write,
    layer={
        **ATTENTION,
        **QK_NORM,
        "router": Stored("mlp.gate.weight", inputs=1),
        "gate": Stored("mlp.experts.{expert}.gate_proj.weight", inputs=1),
        "up": Stored("mlp.experts.{expert}.up_proj.weight", inputs=1),
        "down": Stored("mlp.experts.{expert}.down_proj.weight", inputs=1),
    },
)
