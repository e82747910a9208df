"""The sizes of a model: everything about it but its weights.

A mapping (a preset file, a `config.json`) flows in, one frozen hashable record
flows out; every parameter shape follows from it.
"""

from dataclasses import dataclass

from forge_jax.config import check


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Qwen3 family.

    Raises ValueError on sizes that do not fit together.
    """

    family: str = "qwen3"
    vocab: int
    embed: int  # width of the residual stream
    layers: int
    heads: int
    kv_heads: int  # heads are shared by groups of heads / kv_heads queries
    head_dim: int
    ffn: int  # width of the gated hidden layer
    rope_theta: float
    norm_eps: float = 1e-6
    tied: bool  # True: the unembedding is the transposed embedding
    max_context: int  # positions the model was made for
    init_std: float = 0.02  # of every weight matrix of a fresh model

    def __post_init__(self) -> None:
        check(self.family == "qwen3", f"family={self.family!r} must be 'qwen3'")
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        for name in ("rope_theta", "norm_eps", "max_context", "init_std"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        check(
            self.heads % self.kv_heads == 0,
            f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even (rotary halves it)")
