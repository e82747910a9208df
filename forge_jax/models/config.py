"""The sizes of a model: everything about it but its weights.

A mapping (a preset file, a `config.json`) flows in, one frozen hashable record
flows out; every parameter shape follows from it.
"""

from dataclasses import dataclass

from forge_jax.config import check

FAMILIES = ("qwen3", "qwen3_moe", "llama", "minimax_m2")
QK_NORMS = ("none", "head", "layer")
ROUTERS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretched rotary frequencies (`rope_type="llama3"`)."""

    factor: float  # long wavelengths are stretched by it
    low_frequency: float  # wavelengths beyond original / low_frequency are stretched whole
    high_frequency: float  # ... below original / high_frequency not at all
    original_context: int  # positions before the stretch

    def __post_init__(self) -> None:
        for name in ("factor", "low_frequency", "high_frequency", "original_context"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        check(
            self.low_frequency < self.high_frequency,
            f"low_frequency={self.low_frequency} must be below {self.high_frequency=}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: grouped queries, RMS norms, rotary positions, SwiGLU.

    Raises ValueError on sizes that do not fit together.
    """

    family: str = "qwen3"  # whose files and names it has in Hugging Face folders
    vocab: int
    embed: int  # width of the residual stream
    layers: int
    heads: int
    kv_heads: int  # heads are shared by groups of heads / kv_heads queries
    head_dim: int
    ffn: int  # width of the gated hidden layer; of each expert's where there are experts
    rope_theta: float
    rotary_dim: int | None = None  # leading dimensions of a head that are rotated; None: all
    rope_scaling: RopeScaling | None = None
    qk_norm: str = "head"  # of queries and keys: each head's own, the whole layer's, or none
    norm_eps: float = 1e-6
    tied: bool  # True: the unembedding is the transposed embedding
    max_context: int  # positions the model was made for
    init_std: float = 0.02  # of every weight matrix of a fresh model
    experts: int = 0  # 0: one dense feed-forward layer
    experts_per_token: int = 0
    router: str = "softmax"  # scores of experts: softmax over all, or a sigmoid of each
    router_bias: bool = False  # a bias moves the choice of experts, but not their weights
    norm_top: bool = True  # weights of a token's experts are made to sum to 1
    mtp: int = 0  # depth of the multi-token prediction modules; 0: none

    def __post_init__(self) -> None:
        check(self.family in FAMILIES, f"family={self.family!r} must be one of {FAMILIES}")
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        for name in ("rope_theta", "norm_eps", "max_context", "init_std"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        check(
            self.heads % self.kv_heads == 0,
            f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even (rotary halves it)")
        check(
            self.rotated % 2 == 0 and 0 < self.rotated <= self.head_dim,
            f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}",
        )
        check(self.qk_norm in QK_NORMS, f"qk_norm={self.qk_norm!r} must be one of {QK_NORMS}")
        check(self.router in ROUTERS, f"router={self.router!r} must be one of {ROUTERS}")
        check(self.experts >= 0, f"experts={self.experts} must be >= 0")
        check(
            (1 if self.experts else 0) <= self.experts_per_token <= self.experts,
            f"experts_per_token={self.experts_per_token} must be from 1 to experts={self.experts}",
        )
        check(
            bool(self.experts) or not self.router_bias,
            "router_bias=True needs experts, there are 0",
        )
        check(self.mtp >= 0, f"mtp={self.mtp} must be >= 0")

    @property
    def rotated(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim
