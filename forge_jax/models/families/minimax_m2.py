"""MiniMax-M2 (huggingface.co/MiniMaxAI/MiniMax-M2): experts chosen by sigmoid scores and a
bias that corrects their load, rotary positions on half of a head, one norm over all queries
and one over all keys of a layer.

Multi-token prediction modules are no part of the published weights: they are not read.
"""

from typing import Any

from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import ATTENTION, QK_NORM, Family, Stored
from forge_jax.models.families.keys import Keys


def _read(keys: Keys) -> dict[str, Any]:
    rope = keys.rope(partial=True)
    head = keys.of("head_dim", int)
    # The published folders say `rotary_dim`, transformers 5 a share of the head.
    rotary = keys.of("rotary_dim", int, int(head * rope.partial))
    if rope.partial != 1 and rotary != int(head * rope.partial):
        said = f"rotary_dim={rotary} and partial_rotary_factor={rope.partial}"
        raise UserError(f"{keys.file}: {said} of head_dim={head} disagree")
    if set(keys.raw.get("attn_type_list") or []) - {1}:
        kinds = keys.raw["attn_type_list"]
        raise UserError(f"{keys.file}: attn_type_list={kinds!r} is unsupported, only 1")
    return {
        "kv_heads": keys.of("num_key_value_heads", int),
        "head_dim": head,
        "tied": keys.of("tie_word_embeddings", bool, False),
        "rope_theta": rope.theta,
        "rotary_dim": None if rotary == head else rotary,
        "qk_norm": "layer",
        "experts": keys.of("num_local_experts", int),
        "experts_per_token": keys.of("num_experts_per_tok", int),
        "router": "sigmoid",
        "router_bias": True,
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rotary_dim": cfg.rotated,
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_types=("minimax_m2", "minimax"),
    ffn="intermediate_size",
    plain={
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "shared_intermediate_size": (0, None),
        "router_jitter_noise": (0, 0.0),
        "sliding_window": (None,),
        "layernorm_full_attention_beta": (1, 1.0),
        "layernorm_mlp_beta": (1, 1.0),
    },
    read=_read,
    write=_write,
    layer={
        **ATTENTION,
        **QK_NORM,
        "router": Stored("block_sparse_moe.gate.weight", inputs=1),
        "router_bias": Stored("block_sparse_moe.e_score_correction_bias"),
        "gate": Stored("block_sparse_moe.experts.{expert}.w1.weight", inputs=1),
        "up": Stored("block_sparse_moe.experts.{expert}.w3.weight", inputs=1),
        "down": Stored("block_sparse_moe.experts.{expert}.w2.weight", inputs=1),
    },
    wide=frozenset({"router", "router_bias"}),
)
