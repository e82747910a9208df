"""The rate of a layer of experts on this machine, beside what it stands in for.

    python -m experiments.bench_experts [tokens=4096] [experts=8] [per_token=2] [embed=256]
        [ffn=768] [skew=0] [dtype=float32] [steps=5]

Prints one JSON object. FLOPs a second, forward and backward, are of the products that the
tokens' own experts need, whatever is computed: by "blocks" and "ragged", the implementations of
`forge_jax.models.experts`; by "all", every expert on every token; and by "one", one expert on
as many rows, the dense layer that costs as much.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_attention import DTYPES, seconds, tell
from experiments.command import command
from forge_jax.config import check, load
from forge_jax.models.experts import Experts, mixture

Layer = Callable[..., jax.Array]  # of x [T, E], chosen [T, k], weight [T, k] and Experts


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """One benchmark; see `configs/bench_experts.yaml`."""

    tokens: int = 4096
    experts: int = 8
    per_token: int = 2
    embed: int = 256
    ffn: int = 768
    skew: float = 0.0
    dtype: str = "float32"
    steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "experts", "per_token", "embed", "ffn", "steps"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.per_token <= self.experts, f"per_token={self.per_token} of {self.experts=}")
        check(self.skew >= 0, f"skew={self.skew} must be >= 0")
        check(self.dtype in DTYPES, f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")


@command("bench_experts")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(load(ExpertsConfig, mapping))


def run(cfg: ExpertsConfig) -> dict[str, Any]:
    """The command's result."""
    rng = np.random.default_rng(cfg.seed)
    chosen = routes(cfg, rng)
    load_ = np.bincount(chosen.reshape(-1), minlength=cfg.experts)
    args = arrays(cfg, chosen, rng)
    layers: dict[str, Layer] = {
        "all": everywhere,
        "one": one_expert,
        "ragged": partial(mixture, implementation="ragged"),
        "blocks": partial(mixture, implementation="blocks"),
    }
    rates = {}
    for name, layer in layers.items():
        tell(name)
        rates[name] = measured(layer, args, cfg)
    whole = {n: r["forward_seconds"] + r["backward_seconds"] for n, r in rates.items()}
    return {
        "device": jax.devices()[0].device_kind,
        "rows": chosen.size,
        "load_max": float(load_.max() / load_.mean()),
        "rates": rates,
        "blocks_vs_all": whole["all"] / whole["blocks"],
        "blocks_vs_ragged": whole["ragged"] / whole["blocks"],
        "blocks_vs_one": whole["one"] / whole["blocks"],
    }


def routes(cfg: ExpertsConfig, rng: np.random.Generator) -> np.ndarray:
    """i32[T, k], different experts for a token, by the popularity of each."""
    popularity = -cfg.skew * np.log(np.arange(cfg.experts) + 1)
    noise = rng.gumbel(size=(cfg.tokens, cfg.experts))
    return np.argsort(-(popularity + noise), axis=1)[:, : cfg.per_token].astype(np.int32)


def arrays(cfg: ExpertsConfig, chosen: np.ndarray, rng: np.random.Generator) -> tuple[Any, ...]:
    """Hidden states, routes, weights of the experts, experts, and gradients of the result."""
    x, e, f = cfg.experts, cfg.embed, cfg.ffn

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, cfg.dtype)

    weight = jnp.full(chosen.shape, 1 / cfg.per_token, jnp.float32)
    layer = Experts(normal(x, e, f), normal(x, e, f), normal(x, f, e))
    return normal(cfg.tokens, e), jnp.asarray(chosen), weight, layer, normal(cfg.tokens, e)


def everywhere(x: jax.Array, chosen: jax.Array, weight: jax.Array, layer: Experts) -> jax.Array:
    """Every expert on every token, one expert at a time."""

    def one(y: jax.Array, expert: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        number, layer = expert
        counts = jnp.sum(jnp.where(chosen == number, weight, 0), axis=1).astype(x.dtype)
        return y + swiglu(x, layer) * counts[:, None], None

    return jax.lax.scan(one, jnp.zeros_like(x), (jnp.arange(len(layer.gate)), layer))[0]


def one_expert(x: jax.Array, chosen: jax.Array, weight: jax.Array, layer: Experts) -> jax.Array:
    """The first expert on as many rows as there are routes."""
    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    out = swiglu(rows, Experts(*(w[0] for w in layer))) * weight.reshape(-1, 1).astype(x.dtype)
    return out.reshape(*chosen.shape, -1).sum(axis=1)


def swiglu(x: jax.Array, layer: Experts) -> jax.Array:
    return (jax.nn.silu(x @ layer.gate) * (x @ layer.up)) @ layer.down


def measured(layer: Layer, args: tuple[Any, ...], cfg: ExpertsConfig) -> dict[str, float]:
    """Seconds and TFLOP/s, 3 products forward and 6 backward for each row."""

    def gradients(x, chosen, weight, experts, dy):
        return jax.vjp(lambda x, w, e: layer(x, chosen, w, e), x, weight, experts)[1](dy)

    forward = seconds(jax.jit(layer), args[:-1], cfg.steps)
    whole = seconds(jax.jit(gradients), args, cfg.steps)
    backward = max(whole - forward, 1e-9)  # of two noisy numbers
    product = 2 * args[1].size * cfg.embed * cfg.ffn / 1e12
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_tflops": 3 * product / forward,
        "backward_tflops": 6 * product / backward,
    }


if __name__ == "__main__":
    main()
