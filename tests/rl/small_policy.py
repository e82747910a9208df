"""A small policy, packed batches for it, and calls as an engine would have recorded them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models import layout
from forge_jax.models.config import ModelConfig
from forge_jax.sched.cost import CostModel
from forge_jax.sched.merge import merge
from forge_jax.sched.pack import pad
from forge_jax.sched.split import split
from forge_jax.types import Finish, PackedTree, Sample, Turn

MODEL = ModelConfig(
    vocab=23,
    embed=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=24,
    rope_theta=100.0,
    tied=False,
    max_context=256,
    init_std=0.3,
)
CUT = CostModel(edge=1.0)  # copies cost nothing, so that trees are cut and not carried
TOKENS = 192  # of every micro-batch, so that little is compiled


def parameters(dtype: str = "float32") -> Any:
    return layout.init(MODEL, jax.random.key(1), jnp.dtype(dtype))


def packed(samples: Sequence[Sample], mode: str, budget: int = TOKENS) -> list[PackedTree]:
    """Micro-batches of one shape; a budget below the longest path would have them carried."""
    parts = split(merge(samples, mode), budget, CUT)
    return [pad(part, TOKENS, TOKENS, TOKENS) for part in parts if isinstance(part, PackedTree)]


def make_turn(prompt: Sequence[int], output: Sequence[int], versions: Sequence[int]) -> Turn:
    """A call that ended by itself, its log-probs 0; `versions` is one number a sampled token."""
    return Turn(
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        logprobs=np.zeros(len(output), np.float32),
        versions=np.array(versions, np.int32),
        temperature=1.0,
        finish=Finish.STOP,
        parent=None,
        start=0.0,
        seconds=0.0,
        queue_seconds=0.0,
    )
