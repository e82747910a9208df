"""What a family of models says of its Hugging Face folders: keys of `config.json`, names of
tensors.

A family is data and two small functions; reading and writing folders is shared. Tables that
several families have in common are here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge_jax.models.config import ModelConfig
from forge_jax.models.families.keys import Keys


class Stored(NamedTuple):
    """How one of our parameters is stored.

    A linear map is stored as [out, in], each side flattened; any other as it is.
    """

    name: str  # within its layer; with "{expert}" where every expert has a tensor
    inputs: int = 0  # leading axes that a linear map contracts; 0: no linear map
    flat: bool = False  # all axes as one


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture; `ModelConfig.family` names it."""

    architecture: str  # of `config.json`
    model_types: tuple[str, ...]  # of `config.json`; the first is written
    ffn: str  # the key of `ModelConfig.ffn`
    plain: Mapping[str, tuple[Any, ...]]  # key -> the values we compute, beside `PLAIN`
    read: Callable[[Keys], dict[str, Any]]  # fields of `ModelConfig` beside `SIZES`
    write: Callable[[ModelConfig], dict[str, Any]]  # keys beside `SIZES`; `read`'s inverse
    layer: Mapping[str, Stored]  # our name of a layer's parameter -> theirs
    wide: frozenset[str] = frozenset()  # parameters kept in fp32 beside 16-bit ones


# Our field -> (their key, its type): in every family.
SIZES: dict[str, tuple[str, type]] = {
    "vocab": ("vocab_size", int),
    "embed": ("hidden_size", int),
    "layers": ("num_hidden_layers", int),
    "heads": ("num_attention_heads", int),
    "norm_eps": ("rms_norm_eps", float),
    "max_context": ("max_position_embeddings", int),
}
# Features that no family's transformer here has: the only values under which it computes the
# same function.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
}

TOP = {
    "embed": Stored("model.embed_tokens.weight"),
    "norm": Stored("model.norm.weight"),
    "unembed": Stored("lm_head.weight", inputs=1),
}
ATTENTION = {
    "input_norm": Stored("input_layernorm.weight"),
    "q": Stored("self_attn.q_proj.weight", inputs=1),
    "k": Stored("self_attn.k_proj.weight", inputs=1),
    "v": Stored("self_attn.v_proj.weight", inputs=1),
    "o": Stored("self_attn.o_proj.weight", inputs=2),
    "post_norm": Stored("post_attention_layernorm.weight"),
}
QK_NORM = {
    "q_norm": Stored("self_attn.q_norm.weight", flat=True),
    "k_norm": Stored("self_attn.k_norm.weight", flat=True),
}
DENSE = {
    "gate": Stored("mlp.gate_proj.weight", inputs=1),
    "up": Stored("mlp.up_proj.weight", inputs=1),
    "down": Stored("mlp.down_proj.weight", inputs=1),
}
