"""Policy losses of single occurrences, and what is measured beside them.

The trainer's and the sampler's log-probs go in; one loss an occurrence comes out. The
caller weights, sums and divides: no loss knows of a batch, a mask or a denominator.
"""

from collections.abc import Callable
from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from forge_jax.rl import balance
from forge_jax.trees import Mean, pytree

# loss(logp, old_logp, advantage, ratio_cap), each of the first three [M], gives [M].
Loss = Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]


def cispo(
    logp: Float[Array, " M"],
    old_logp: Float[Array, " M"],
    advantage: Float[Array, " M"],
    ratio_cap: float,
) -> Float[Array, " M"]:
    """``-stop_gradient(min(r, cap)) * A * logp`` with ``r = exp(logp - old_logp)``.

    The cap is absolute and there is no lower floor: a clipped token keeps the gradient
    ``-cap * A``, and one that the policy has left fades out. `old_logp` is the sampler's.
    After MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    ratio = jnp.minimum(jnp.exp(logp - old_logp), ratio_cap)
    return -jax.lax.stop_gradient(ratio) * advantage * logp


def negative_log_likelihood(
    logp: Float[Array, " M"],
    old_logp: Float[Array, " M"],
    advantage: Float[Array, " M"],
    ratio_cap: float,
) -> Float[Array, " M"]:
    """``-logp``: the imitation loss of a warm start; the rest is not looked at."""
    del old_logp, advantage, ratio_cap
    return -logp


@pytree
class Metrics:
    """Measures over the trained occurrences; those of micro-batches may be added."""

    ratio: Mean  # importance ratio, before the cap
    ratio_max: jax.Array  # [], largest of them
    clipped: Mean  # share of ratios above the cap
    gap: Mean  # |logp - old_logp|, nats
    kl: Mean  # of the sampler from the trainer's policy: r - 1 - log r, nats
    entropy: Mean  # of the trainer's policy, nats
    beside: dict[str, Mean] = field(default_factory=dict)  # of losses that are added, by name
    load: jax.Array | None = None  # f32[layers, X], choices of each expert; None without any

    def __add__(self, other: "Metrics") -> "Metrics":
        return Metrics(
            ratio=self.ratio + other.ratio,
            ratio_max=jnp.maximum(self.ratio_max, other.ratio_max),
            clipped=self.clipped + other.clipped,
            gap=self.gap + other.gap,
            kl=self.kl + other.kl,
            entropy=self.entropy + other.entropy,
            beside={name: mean + other.beside[name] for name, mean in self.beside.items()},
            load=None if self.load is None or other.load is None else self.load + other.load,
        )

    def values(self) -> dict[str, float]:
        """The measures as numbers; call it once the last micro-batch is added."""
        means = {
            "ratio_mean": self.ratio,
            "clip_share": self.clipped,
            "logp_gap": self.gap,
            "kl": self.kl,
            "entropy": self.entropy,
        }
        means |= {name: mean for name, mean in self.beside.items() if float(mean.count)}
        ratios = {name: float(m.total) / float(m.count) for name, m in means.items()}
        loads = {} if self.load is None else balance.measures(self.load)
        return {"ratio_max": float(self.ratio_max), **ratios, **loads}


def measure(
    logp: Float[Array, " M"],
    old_logp: Float[Array, " M"],
    entropy: Float[Array, " M"],
    weight: Float[Array, " M"],
    ratio_cap: float,
) -> Metrics:
    """The metrics of one micro-batch; `weight` is 0 at padding.

    The KL estimate is k3 of http://joschu.net/blog/kl-approx.html: unbiased, never negative.
    """
    delta = logp - old_logp
    ratio = jnp.exp(delta)
    return Metrics(
        ratio=Mean.of(ratio, weight),
        ratio_max=jnp.max(ratio, where=weight > 0, initial=0.0),
        clipped=Mean.of((ratio > ratio_cap).astype(weight.dtype), weight),
        gap=Mean.of(jnp.abs(delta), weight),
        kl=Mean.of(ratio - 1 - delta, weight),
        entropy=Mean.of(entropy, weight),
    )
