"""A micro-batch's share of the loss, from what a forward pass found.

Log-probs, entropies, guesses and routing go in; sums of terms over a denominator that is fixed
before micro-batching come out, with their metrics: the shares of a step add up to its loss.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from forge_jax.models.moe import Routing
from forge_jax.rl import balance, mtp, ranks
from forge_jax.rl.forward import Batch, StepConfig
from forge_jax.rl.losses import Metrics, Seen, divergence, gspo, measure
from forge_jax.trees import Mean


def share_of_loss(
    logp: Float[Array, " M"],
    entropy: Float[Array, " M"],
    batch: Batch,
    denominator: Float[Array, ""],
    cfg: StepConfig,
) -> tuple[Float[Array, ""], tuple[Metrics, Float[Array, " M"], Float[Array, " M"]]]:
    """The terms ``weight * loss`` over `denominator`, summed; and beside it, without a
    gradient, the metrics, `logp` and the terms."""
    weight = jnp.asarray(batch.weight, logp.dtype)
    seen = seen_of(logp, batch, cfg)
    judged = cfg.loss(seen, cfg.objective, cfg.ratio_cap)
    each = judged.loss
    trained = (weight > 0).astype(weight.dtype)  # whatever a mean of the loss is over
    beside = {}
    if cfg.objective.kl:
        reference = cfg.objective.reference is not None
        apart = divergence(logp, reference_of(batch, logp.dtype) if reference else seen.anchor)
        each = each + cfg.objective.kl * apart
        beside = {"kl_reference": Mean.of(apart, trained)} if reference else {}
    if cfg.objective.entropy:
        each = each - cfg.objective.entropy * entropy
    terms = jnp.where(weight > 0, each * weight, 0.0)
    metrics = measure(logp, seen.old_logp, entropy, judged.clipped, trained)
    metrics = replace(metrics, beside=beside)
    return jnp.sum(terms) / denominator, jax.lax.stop_gradient((metrics, logp, terms))


def seen_of(logp: Float[Array, " M"], batch: Batch, cfg: StepConfig) -> Seen:
    """What the loss sees of occurrences whose log-probs are `logp`.

    Where the trainer's own log-probs are the anchor and are not among `batch.others`, the weights
    are those before the first update: `logp` is the anchor. Raises ValueError where a loss of
    whole samples lacks their ratios.
    """
    old_logp, advantage = (jnp.asarray(x, logp.dtype) for x in (batch.old_logp, batch.advantage))
    others = {name: jnp.asarray(x, logp.dtype) for name, x in batch.others.items()}
    own = jax.lax.stop_gradient(logp) if cfg.objective.recomputed else old_logp
    if cfg.loss is gspo and not cfg.objective.recomputed and "sequence" not in others:
        raise ValueError("gspo needs the ratios of samples: see forge_jax.rl.anchors")
    return Seen(
        logp=logp,
        old_logp=old_logp,
        anchor=others.get("anchor", own),
        sequence=others.get("sequence", jnp.zeros_like(logp)),
        advantage=advantage,
    )


def reference_of(batch: Batch, dtype: Any) -> Float[Array, " M"]:
    """Log-probs of the policy that the loss holds its own near. Raises ValueError without any."""
    if "reference" not in batch.others:
        raise ValueError("loss.reference needs its log-probs: see forge_jax.rl.anchors")
    return jnp.asarray(batch.others["reference"], dtype)


def share_of_modules(
    guess: mtp.Guess, batch: Batch, denominator: Float[Array, ""], cfg: StepConfig
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """The modules' share of the loss, see `mtp.share_of_loss`, and its metrics."""
    dtype = guess.loss.dtype
    edge, weight = jnp.asarray(batch.occurrence_edge), jnp.asarray(batch.weight > 0, dtype)
    weight = jnp.zeros(len(batch.source), dtype).at[edge].add(weight)
    depth = jnp.asarray(batch.depth)[jnp.asarray(batch.source)]
    return mtp.share_of_loss(guess, weight, depth, denominator, cfg.mtp)


def share_of_experts(
    routing: Routing,
    batch: Batch,
    denominator: Float[Array, ""],
    cfg: StepConfig,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, "layers X"]]:
    """The balance's share of the loss, see `balance.share_of_loss`, and the load of experts."""
    share = jnp.zeros(())
    if cfg.moe.balance == "aux":
        weight = jnp.asarray(batch.weight > 0, jnp.float32)
        over = ranks.over(mesh, "context")
        share = balance.share_of_loss(routing, weight, denominator, cfg.moe.rate, over)
    return share, jax.lax.stop_gradient(routing.load)
