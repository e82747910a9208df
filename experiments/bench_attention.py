"""The rate of prefix-tree attention on this machine, beside that of a plain matrix product.

    python -m experiments.bench_attention [implementation=auto] [workload=causal|forest]
        [tokens=16384] [heads=16] [kv_heads=4] [head_dim=128] [dtype=bfloat16] [steps=5]

Prints one JSON object: FLOPs a second, forward and backward, of the pairs that the mathematics
needs, and how much of the executed area they are. On a CUDA device a causal workload of 16-bit
numbers is also given to cuDNN's attention.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import command
from forge_jax.attention.plan import TilePlan, executed_pairs, tree_plan
from forge_jax.attention.tree import (
    IMPLEMENTATIONS,
    default_tile,
    layout_of,
    resolve,
    tree_attention,
)
from forge_jax.config import UserError, check, load

WORKLOADS = ("causal", "forest")
DTYPES = ("float32", "bfloat16", "float16")
NEEDS = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}  # what an implementation runs on
PRODUCT_SIDE = {"cpu": 2048}  # of the matrices of the plain product
DEVICE_SIDE = 8192  # ... on anything faster

Attend = Callable[..., jax.Array]  # of q, k, v [T, heads, D]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One benchmark; see `configs/bench_attention.yaml`."""

    implementation: str = "auto"
    workload: str = "causal"
    tokens: int = 16384
    branches: int = 16
    window: int | None = None
    softcap: float | None = None
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    tile: tuple[int, ...] | None = None
    steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("implementation", IMPLEMENTATIONS), ("workload", WORKLOADS), ("dtype", DTYPES),
        ):  # fmt: skip
            said = getattr(self, name)
            check(said in known, f"{name}={said!r} must be one of {', '.join(known)}")
        for name in ("tokens", "branches", "heads", "kv_heads", "head_dim", "steps"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.heads % self.kv_heads == 0, f"heads={self.heads} of kv_heads={self.kv_heads}")
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        check(self.softcap is None or self.softcap > 0, f"softcap={self.softcap} must be positive")
        check(self.tile is None or len(self.tile) == 2, f"tile={self.tile} must be two sides")


@command("bench_attention")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(load(AttentionConfig, mapping))


def run(cfg: AttentionConfig) -> dict[str, Any]:
    """The command's result. Raises UserError for what cannot be benchmarked here."""
    device = jax.devices()[0]
    implementation = supported(cfg)
    exit_, depth = tokens_of(cfg)
    tile = cfg.tile or default_tile(implementation, cfg.dtype)
    plan = tree_plan(
        exit_, depth, cfg.window, tile=(tile[0], tile[1]), bucket=lambda size: size,
        layout=layout_of(implementation, cfg.dtype),
    )  # fmt: skip
    area = int(np.minimum(depth + 1, cfg.window or len(depth)).sum())
    attend = partial(
        tree_attention, plan=jax.device_put(plan), scale=cfg.head_dim**-0.5, softcap=cfg.softcap,
        implementation=implementation,
    )  # fmt: skip
    tell(f"{implementation} on {device.device_kind}")
    try:
        rates = attention_rates(lambda *qkv: attend(*qkv)[0], cfg, area)
    except NotImplementedError as error:
        raise UserError(str(error)) from error
    return {
        "implementation": implementation,
        "device": device.device_kind,
        "tokens": cfg.tokens,
        "pairs": area,  # that attend, for one head
        "useful": area / visited(plan, implementation),
        **rates,
        "product_tflops": product_rate(cfg) / 1e12,
        "cudnn": cudnn_rates(cfg, area),
    }


def supported(cfg: AttentionConfig) -> str:
    """The implementation that is meant. Raises UserError where it does not run."""
    try:
        chosen = resolve(cfg.implementation, cfg.dtype)
    except NotImplementedError as error:
        raise UserError(str(error)) from error
    here = jax.default_backend()
    if NEEDS.get(chosen, here) != here:
        raise UserError(f"implementation={chosen} needs a {NEEDS[chosen]}, and this is a {here}")
    return chosen


def tokens_of(cfg: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(exit, depth) i32[tokens]: one sequence; or a trunk of a quarter of the tokens, and
    branches of about equal length that share the rest."""
    n = cfg.tokens
    trunk = n if cfg.workload == "causal" else n // 4
    ends = trunk + np.linspace(0, n - trunk, cfg.branches + 1).astype(np.int32)
    index = np.arange(n, dtype=np.int32)
    branch = np.searchsorted(ends[1:], index, side="right")
    in_trunk = index < trunk
    last = cfg.branches - 1
    exit_ = np.where(in_trunk, n, ends[1:][np.minimum(branch, last)])
    depth = np.where(in_trunk, index, trunk + index - ends[np.minimum(branch, last)])
    return exit_.astype(np.int32), depth.astype(np.int32)


def visited(plan: TilePlan, implementation: str) -> int:
    """Pairs computed for one head."""
    dense = plan.q_id.shape[0] * plan.k_id.shape[0]
    return dense if implementation == "reference" else executed_pairs(plan)


def attention_rates(attend: Attend, cfg: AttentionConfig, area: int) -> dict[str, float]:
    """Seconds and TFLOP/s of the useful area: 4 FLOPs a pair and channel forward, 10 backward."""
    rng = np.random.default_rng(cfg.seed)
    q, k, v, do = (
        jnp.asarray(rng.standard_normal((cfg.tokens, heads, cfg.head_dim)), cfg.dtype)
        for heads in (cfg.heads, cfg.kv_heads, cfg.kv_heads, cfg.heads)
    )

    def gradients(q, k, v, do):
        return jax.vjp(attend, q, k, v)[1](do)

    forward = seconds(jax.jit(attend), (q, k, v), cfg.steps)
    whole = seconds(jax.jit(gradients), (q, k, v, do), cfg.steps)
    backward = max(whole - forward, 1e-9)  # of two noisy numbers
    unit = cfg.heads * cfg.head_dim * area / 1e12
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_tflops": 4 * unit / forward,
        "backward_tflops": 10 * unit / backward,
    }


def product_rate(cfg: AttentionConfig) -> float:
    """FLOPs a second of one large square product of `cfg.dtype`."""
    side = PRODUCT_SIDE.get(jax.default_backend(), DEVICE_SIDE)
    matrix = jnp.ones((side, side), cfg.dtype)
    return 2 * side**3 / seconds(jax.jit(jnp.matmul), (matrix, matrix), cfg.steps)


def cudnn_rates(cfg: AttentionConfig, area: int) -> dict[str, float] | None:
    """As `attention_rates`, of cuDNN's causal attention; None where it has no such case."""
    plain = cfg.workload == "causal" and cfg.window is None and cfg.softcap is None
    cuda = "cuda" in jax.devices()[0].client.platform_version.lower()
    if not (cuda and plain and cfg.dtype != "float32"):
        return None
    tell("cuDNN")

    def attend(q, k, v):
        dot = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        return dot(q[None], k[None], v[None], scale=cfg.head_dim**-0.5)[0]

    return attention_rates(attend, cfg, area)


def seconds(function: Callable, args: tuple, steps: int) -> float:
    """The median time of `steps` calls, after one that compiles."""
    jax.block_until_ready(function(*args))
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
