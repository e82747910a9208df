"""FLOPs of one update, counted from the model's sizes and from what a forest holds.

Only what the mathematics needs is counted: real tokens, visible pairs, loss-bearing edges;
no padding, and no tile that attention visits in vain.
"""

from dataclasses import dataclass

from forge_jax.models.config import ModelConfig
from forge_jax.sched.pack import attention_area
from forge_jax.types import PackedTree


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one update computes."""

    tokens: int  # through the layers
    pairs: int  # (query, key) pairs that attend, for one head of one layer
    edges: int  # through the head


def work(forest: PackedTree) -> Work:
    """The work of a merged forest, padded or not."""
    return Work(tokens=forest.n_tokens, pairs=attention_area(forest), edges=forest.n_edges)


def layer_weights(cfg: ModelConfig) -> int:
    """Weights that are not embeddings; the norms' scales, which are no products, left out."""
    attention = cfg.embed * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    return cfg.layers * (attention + 3 * cfg.embed * cfg.ffn)


def update_flops(cfg: ModelConfig, done: Work) -> int:
    """Forward and backward: 6 a weight and token, 14 a pair and channel, 6 a logit and channel.

    Of a pair's 14, 4 are the forward's two products and 10 the backward's five, one of which
    forms the scores again. A multiply-add is two.
    """
    return (
        6 * layer_weights(cfg) * done.tokens
        + 14 * cfg.layers * cfg.heads * cfg.head_dim * done.pairs
        + 6 * cfg.embed * cfg.vocab * done.edges
    )
