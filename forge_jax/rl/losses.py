"""Policy losses of single occurrences, and what is measured beside them.

Log-probs of an occurrence under the trainer's policy and under those it is compared with go in;
its loss comes out, and whether a limit bites. The caller weights, sums and divides: no loss
knows of a batch, a mask or a denominator. What a loss needs of a whole sample comes in as data
of its occurrences, so that no loss depends on how samples are merged or cut.
"""

from collections.abc import Callable
from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from forge_jax.config import LossConfig
from forge_jax.rl import balance
from forge_jax.trees import Mean, pytree

LOG_RATIO = 20.0  # nats, beyond which a ratio that has a gradient stays as it is: e^20 is finite


@pytree
class Seen:
    """What a loss sees of M occurrences; only `logp` has a gradient."""

    logp: Float[Array, " M"]  # under the weights that are being updated
    old_logp: Float[Array, " M"]  # the sampler's
    anchor: Float[Array, " M"]  # what ratios are to: the sampler's, or the trainer's before
    sequence: Float[Array, " M"]  # mean of logp - anchor over the occurrence's sample
    advantage: Float[Array, " M"]


@pytree
class Judged:
    """What a loss makes of them."""

    loss: Float[Array, " M"]
    clipped: Bool[Array, " M"]  # a limit of the loss bites


# loss(seen, cfg, ratio_cap)
Loss = Callable[[Seen, LossConfig, float], Judged]


def cispo(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """``-stop_gradient(min(r, cap)) * A * logp`` with ``r = exp(logp - anchor)``.

    The cap is absolute and there is no lower floor: a clipped token keeps the gradient
    ``-cap * A``, and one that the policy has left fades out. With `cfg.mask` tokens that have
    moved beyond the bounds the way their advantage wants are dropped. After MiniMax-M1,
    arXiv 2506.13585, equations 4 and 5, and 6 and 7 for the mask.
    """
    ratio = jnp.exp(seen.logp - seen.anchor)
    loss = -jax.lax.stop_gradient(jnp.minimum(ratio, ratio_cap)) * seen.advantage * seen.logp
    clipped = ratio > ratio_cap
    if cfg.mask:
        beyond = _beyond(ratio, seen.advantage, cfg)
        loss, clipped = jnp.where(beyond, 0.0, loss), clipped | beyond
    return Judged(loss=loss, clipped=clipped)


def clip(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """``-min(r * A, clip(r, 1 - low, 1 + high) * A)``: a clipped token has no gradient.

    PPO's objective (arXiv 1707.06347), as GRPO (2402.03300) and, with low and high apart, DAPO
    (2503.14476) take it, token by token.
    """
    del ratio_cap
    return _clipped(_ratio(seen.logp - seen.anchor), seen.advantage, cfg)


def gspo(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """`clip` of the sample's ratio ``s = exp(mean of logp - anchor over its trained tokens)``.

    The value is that of the sample's ratio at each of its tokens, the gradient by a token's logp
    ``-s * A``, or 0 where the sample is clipped: the mean over the sample's tokens has the value
    and the gradient of GSPO (arXiv 2507.18071), in the form that it calls GSPO-token.
    """
    del ratio_cap
    here = seen.logp - jax.lax.stop_gradient(seen.logp)  # 0, with a gradient
    return _clipped(_ratio(seen.sequence) * jnp.exp(here), seen.advantage, cfg)


def decoupled(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """`clip` by the ratio to the trainer's anchor, times ``min(exp(anchor - old_logp), cap)``.

    The clip holds the policy near where the batch found it, the weight corrects for who sampled:
    decoupled PPO (arXiv 2110.00641; AReaL, 2505.24298), its weight truncated.
    """
    weight, capped = _behaviour(seen, ratio_cap)
    inner = clip(seen, cfg, ratio_cap)
    return Judged(loss=weight * inner.loss, clipped=inner.clipped | capped)


def tis(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """``-min(exp(anchor - old_logp), cap) * A * logp``: REINFORCE, corrected for who sampled.

    Truncated importance sampling (Ionides, 2008) between the trainer's policy before the batch
    and the sampler's; later updates of the batch leave the weight as it is.
    """
    del cfg
    weight, capped = _behaviour(seen, ratio_cap)
    return Judged(loss=-weight * seen.advantage * seen.logp, clipped=capped)


def reinforce(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """``-A * logp``: exact where the policy that is updated sampled, and biased elsewhere."""
    del cfg, ratio_cap
    return _unclipped(-seen.advantage * seen.logp)


def negative_log_likelihood(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """``-logp``: the imitation loss of a warm start; the rest is not looked at."""
    del cfg, ratio_cap
    return _unclipped(-seen.logp)


LOSSES: dict[str, Loss] = {  # by `LossConfig.kind`
    "cispo": cispo,
    "clip": clip,
    "gspo": gspo,
    "decoupled": decoupled,
    "tis": tis,
    "reinforce": reinforce,
}


def divergence(logp: Float[Array, " M"], other: Float[Array, " M"]) -> Float[Array, " M"]:
    """``exp(other - logp) - 1 - (other - logp)``: of the policy from another one, nats.

    Its mean over what the policy samples is the KL divergence: k3 of
    http://joschu.net/blog/kl-approx.html, never negative.
    """
    apart = jnp.clip(other - logp, -LOG_RATIO, LOG_RATIO)
    return jnp.exp(apart) - 1 - apart


def _ratio(log_ratio: Float[Array, " M"]) -> Float[Array, " M"]:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO, LOG_RATIO))


def _behaviour(seen: Seen, ratio_cap: float) -> tuple[Float[Array, " M"], Bool[Array, " M"]]:
    """The anchor's ratio to the sampler, at most the cap; and where it is that."""
    ratio = jax.lax.stop_gradient(jnp.exp(seen.anchor - seen.old_logp))
    return jnp.minimum(ratio, ratio_cap), ratio > ratio_cap


def _beyond(
    ratio: Float[Array, " M"], advantage: Float[Array, " M"], cfg: LossConfig
) -> Bool[Array, " M"]:
    """Where the policy has moved out of the bounds, the way the advantage wants."""
    least, most = cfg.bounds
    return ((advantage > 0) & (ratio > most)) | ((advantage < 0) & (ratio < least))


def _clipped(ratio: Float[Array, " M"], advantage: Float[Array, " M"], cfg: LossConfig) -> Judged:
    least, most = cfg.bounds
    held = jnp.clip(ratio, least, most)
    return Judged(
        loss=-jnp.minimum(ratio * advantage, held * advantage),
        clipped=_beyond(ratio, advantage, cfg),
    )


def _unclipped(loss: Float[Array, " M"]) -> Judged:
    return Judged(loss=loss, clipped=jnp.zeros(loss.shape, bool))


@pytree
class Metrics:
    """Measures over the trained occurrences; those of micro-batches may be added."""

    ratio: Mean  # importance ratio, before the cap
    ratio_max: jax.Array  # [], largest of them
    clipped: Mean  # share of occurrences at which a limit of the loss bites
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
    clipped: Bool[Array, " M"],
    weight: Float[Array, " M"],
) -> Metrics:
    """The metrics of one micro-batch; `weight` is 0 at padding, ratios are to the sampler.

    The KL estimate is k3 of http://joschu.net/blog/kl-approx.html: unbiased, never negative.
    """
    delta = logp - old_logp
    ratio = jnp.exp(delta)
    return Metrics(
        ratio=Mean.of(ratio, weight),
        ratio_max=jnp.max(ratio, where=weight > 0, initial=0.0),
        clipped=Mean.of(clipped.astype(weight.dtype), weight),
        gap=Mean.of(jnp.abs(delta), weight),
        kl=Mean.of(ratio - 1 - delta, weight),
        entropy=Mean.of(entropy, weight),
    )
