"""The same models in `transformers`."""

from typing import Any

import numpy as np
import pytest

from forge_jax.models.config import ModelConfig

torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

CLASSES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
}


def oracle(cfg: ModelConfig, seed: int = 0) -> Any:
    """A random model of `transformers` whose norm scales are not 1 and biases not 0."""
    torch.manual_seed(seed)
    config, model = CLASSES[cfg.family]
    made = model(
        config(
            vocab_size=cfg.vocab,
            hidden_size=cfg.embed,
            num_hidden_layers=cfg.layers,
            num_attention_heads=cfg.heads,
            num_key_value_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            max_position_embeddings=cfg.max_context,
            rms_norm_eps=cfg.norm_eps,
            rope_parameters=_rope(cfg),
            tie_word_embeddings=cfg.tied,
            initializer_range=cfg.init_std,
            bos_token_id=0,
            eos_token_id=1,
            **_feed_forward(cfg),
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in made.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return made.eval()


def _rope(cfg: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rotary_dim is not None:
        rope["partial_rotary_factor"] = cfg.rotary_dim / cfg.head_dim
    if cfg.rope_scaling is not None:
        rope["rope_type"] = "llama3"
        rope["factor"] = cfg.rope_scaling.factor
        rope["low_freq_factor"] = cfg.rope_scaling.low_frequency
        rope["high_freq_factor"] = cfg.rope_scaling.high_frequency
        rope["original_max_position_embeddings"] = cfg.rope_scaling.original_context
    return rope


def _feed_forward(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.family == "qwen3_moe":
        return {
            "intermediate_size": 99,  # of dense layers, of which there are none
            "moe_intermediate_size": cfg.ffn,
            "num_experts": cfg.experts,
            "num_experts_per_tok": cfg.experts_per_token,
            "norm_topk_prob": cfg.norm_top,
        }
    if cfg.family == "minimax_m2":
        return {
            "intermediate_size": cfg.ffn,
            "num_local_experts": cfg.experts,
            "num_experts_per_tok": cfg.experts_per_token,
        }
    return {"intermediate_size": cfg.ffn}


def oracle_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(tokens, dtype=torch.long)).logits.float().numpy()


def published_names(named: dict[str, np.ndarray], cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors of a model of `transformers` under the names of published folders: it keeps the
    gates and ups of all experts as one."""
    found: dict[str, np.ndarray] = {}
    minimax = cfg.family == "minimax_m2"
    gate, up, down = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
    for name, value in named.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if minimax else name
        if name.endswith("gate_up_proj"):
            for i, both in enumerate(value):
                stem = name.replace("gate_up_proj", str(i))
                found[f"{stem}.{gate}.weight"], found[f"{stem}.{up}.weight"] = np.split(both, 2)
        elif name.endswith("experts.down_proj"):
            for i, one in enumerate(value):
                found[name.replace("down_proj", f"{i}.{down}.weight")] = one
        else:
            found[name] = value
    return found
