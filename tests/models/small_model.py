"""A small model, and attention as these tests see it: dense, by a mask."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.config import ModelConfig, RopeScaling
from forge_jax.models.layout import layout
from forge_jax.models.transformer import Attend, hidden, logits
from forge_jax.trees import Param, is_param

SMALL = ModelConfig(
    vocab=61,
    embed=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=40,
    rope_theta=10000.0,
    tied=False,
    max_context=64,
    init_std=0.3,
)

TIED = dataclasses.replace(SMALL, tied=True)
SPARSE = dataclasses.replace(
    SMALL, family="qwen3_moe", ffn=24, experts=6, experts_per_token=2, norm_top=True
)
LLAMA = dataclasses.replace(
    SMALL,
    family="llama",
    qk_norm="none",
    norm_eps=1e-5,
    rope_scaling=RopeScaling(
        factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=16
    ),
)
SMOL = dataclasses.replace(
    LLAMA, heads=3, kv_heads=1, rope_theta=100000.0, rope_scaling=None, tied=True
)
MINIMAX = dataclasses.replace(
    SPARSE,
    family="minimax_m2",
    rotary_dim=4,
    qk_norm="layer",
    router="sigmoid",
    router_bias=True,
)
# One of every family and, of dense ones, both kinds of output matrix.
FAMILIES = {
    "qwen3": SMALL,
    "qwen3_tied": TIED,
    "qwen3_moe": SPARSE,
    "llama": LLAMA,
    "smollm2": SMOL,
    "minimax_m2": MINIMAX,
}


def dense(sees: Any) -> Attend:
    """Attention where query i reads key j iff sees[i, j]."""

    def attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
        groups = q.shape[-2] // k.shape[-2]
        k, v = jnp.repeat(k, groups, -2), jnp.repeat(v, groups, -2)
        scores = jnp.einsum("...thd,...shd->...hts", q, k) * q.shape[-1] ** -0.5
        mask = jnp.broadcast_to(jnp.asarray(sees), scores.shape)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("...hts,...shd->...thd", weights, v), cache

    return attend


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def states(
    params: Any, tokens: Any, positions: Any, sees: Any, cfg: ModelConfig, remat: str = "none"
) -> Any:
    """Hidden states of tokens[..., T] where query i reads key j iff sees[i, j]."""
    return hidden(params, tokens, positions, dense(sees), cfg, remat=remat)[0]


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def forward(params: Any, tokens: Any, cfg: ModelConfig, remat: str = "none") -> Any:
    """Causal logits of whole sequences, tokens[..., T]."""
    n = tokens.shape[-1]
    positions = np.broadcast_to(np.arange(n), tokens.shape)
    return logits(params, states(params, tokens, positions, causal(n), cfg, remat), cfg)


def causal(n: int) -> np.ndarray:
    return np.tril(np.ones((n, n), bool))


def weights(cfg: ModelConfig, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Parameters, drawn on the host, whose norm scales are not 1 and biases not 0: each matters."""
    rng = np.random.default_rng(seed)

    def draw(p: Param) -> Any:
        noise = rng.normal(size=p.shape)
        return jnp.asarray((noise * p.std if p.std else p.fill + 0.1 * noise).astype(dtype))

    return jax.tree.map(draw, layout(cfg), is_leaf=is_param)


def draw_tokens(cfg: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, cfg.vocab, shape, dtype=np.int32)


def same(a: Any, b: Any) -> None:
    """Equal bit for bit, dtypes included."""

    def check(x: Any, y: Any) -> None:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, a, b)
