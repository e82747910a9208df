"""One update of the policy from the micro-batches of a step.

Padded `PackedTree`s and a `TrainState` go in; the next state, metrics and the log-prob of
every trained occurrence come out. The denominator is the number of trained occurrences of
the whole step, fixed before micro-batching, so loss and gradient depend neither on how
samples were merged nor on how trees were packed. Whether a step is taken is decided between its
gradients and the optimiser, on numbers that all processes of a mesh hold alike.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from forge_jax.attention.plan import executed_pairs
from forge_jax.config import OptimConfig, Skip
from forge_jax.models.lora import trained_of, tuned, with_trained
from forge_jax.rl import balance, carry
from forge_jax.rl.forward import (
    Batch,
    StepConfig,
    occurrences,
    to_batch,
)
from forge_jax.rl.losses import Metrics
from forge_jax.rl.prefetch import prefetch
from forge_jax.rl.state import TrainState, optimizer, policy_of
from forge_jax.rl.terms import share_of_experts, share_of_loss, share_of_modules
from forge_jax.sched.split import forest_of
from forge_jax.types import CarriedTree, MicroBatch, PackedTree


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """What one update came to, on the host."""

    stepped: bool  # False: skipped, or no occurrence was trained; the state is as it was
    skipped: Skip | None = None
    loss: float
    grad_norm: float  # global L2 of the policy, before clipping
    metrics: dict[str, float]
    logp: np.ndarray  # f32[M] of every trained occurrence, under the weights before the update
    index: np.ndarray  # i64[M], their places in the concatenated samples
    seconds: float  # wall time of gradients and metrics, the optimiser's aside


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """The sums over the micro-batches of a step, before any update."""

    grads: Any  # like the parameters, on the device
    loss: float  # summed in float64: large terms of both signs nearly cancel
    metrics: Metrics
    logp: np.ndarray  # as in `Updated`
    index: np.ndarray
    seconds: float


# judge(gathered, norm of the policy's gradient) gives why a step is not to be taken, or None.
Judge = Callable[[Gathered, float], Skip | None]


def differentiate(
    params: Any,
    batch: Batch,
    denominator: Float[Array, ""],
    cfg: StepConfig,
    mesh: Mesh | None = None,
) -> tuple[Any, Metrics, Float[Array, " M"], Float[Array, " M"]]:
    """Gradient of a micro-batch's share of the loss, its metrics, and per occurrence the
    log-prob and the term ``weight * loss``.

    The share is the sum of the terms over `denominator`; gradients are of what is trained of
    `params`, and in its dtype.

    `mesh` is that of the enclosing map over all its ranks, see `forge_jax.rl.parallel`: `batch`
    is then this rank's part of a micro-batch, `params` its part of the parameters, and
    gradients are summed over the ranks among which these parts are lent, and over no others.
    """

    def objective(trained: Any) -> tuple[jax.Array, tuple[Metrics, jax.Array, jax.Array]]:
        found = occurrences(with_trained(params, trained), batch, cfg, mesh)
        share, (metrics, logp, terms) = share_of_loss(
            found.logp, found.entropy, batch, denominator, cfg
        )
        if found.guess is not None:
            more, measured = share_of_modules(found.guess, batch, denominator, cfg)
            share, metrics = share + more, replace(metrics, beside=metrics.beside | measured)
        if found.routing is not None:
            more, load = share_of_experts(found.routing, batch, denominator, cfg, mesh)
            share, metrics = share + more, replace(metrics, load=load)
        return share, (metrics, logp, terms)

    grads, beside = jax.grad(objective, has_aux=True)(trained_of(params))
    return grads, *beside


gradients = jax.jit(differentiate, static_argnames=("cfg", "mesh"))


def logprobs(
    params: Any, part: MicroBatch, cfg: StepConfig
) -> Iterator[tuple[np.ndarray, Float[Array, " M"]]]:
    """Log-probs of a micro-batch's occurrences, in one piece or more, without a gradient;
    first their places in the concatenated samples, -1 at padding."""
    if isinstance(part, CarriedTree):
        yield from carry.logprobs(params, part, cfg)
    else:
        yield part.occurrence_index, _logprobs(params, to_batch(part, cfg), cfg)


@partial(jax.jit, static_argnames=("cfg",))
def _logprobs(params: Any, batch: Batch, cfg: StepConfig) -> Float[Array, " M"]:
    return occurrences(params, batch, cfg).logp


@partial(jax.jit, donate_argnames=("sums",))
def _add(sums: tuple[Any, Metrics], part: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
    return jax.tree.map(jnp.add, sums[0], part[0]), sums[1] + part[1]


def gather(params: Any, parts: Sequence[MicroBatch], cfg: StepConfig) -> Gathered:
    """Sums gradients and metrics over the micro-batches of one step.

    Raises ValueError if there is no trained occurrence to average over.
    """
    trained = sum(forest_of(part).n_occurrences for part in parts)
    return total(_each(params, parts, float(trained), cfg), trained)


def _each(
    params: Any, parts: Sequence[MicroBatch], denominator: float, cfg: StepConfig
) -> Iterator[tuple[np.ndarray, Any, Metrics, Array, Array]]:
    packed = [part for part in parts if isinstance(part, PackedTree)]
    batches = prefetch(lambda tree: to_batch(tree, cfg), packed)
    for tree, batch in zip(packed, batches, strict=True):
        yield tree.occurrence_index, *gradients(params, batch, denominator, cfg)
    for part in parts:
        if isinstance(part, CarriedTree):
            yield from carry.gradients(params, part, denominator, cfg)


def total(parts: Iterable[tuple[np.ndarray, Any, Metrics, Any, Any]], trained: int) -> Gathered:
    """What `gather` gives, from the places of its occurrences, -1 at padding, and the
    `gradients` of each micro-batch. Raises ValueError if `trained` is 0."""
    if trained == 0:
        raise ValueError("no trained occurrence in any micro-batch")
    began = time.perf_counter()
    sums, found = None, []
    for index, grads, metrics, *each in parts:
        sums = (grads, metrics) if sums is None else _add(sums, (grads, metrics))
        found.append((index, *each))
    assert sums is not None
    index, logp, terms = (
        np.concatenate([x[place >= 0] for x, (place, *_) in zip(values, found, strict=True)])
        for values in zip(*jax.device_get(found), strict=True)
    )
    return Gathered(
        grads=sums[0],
        loss=float(np.sum(terms, dtype=np.float64)) / trained,
        metrics=sums[1],
        logp=logp,
        index=index,
        seconds=time.perf_counter() - began,
    )


@jax.jit
def norms(grads: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Global L2 norm of `grads`, prediction modules aside, and with them."""
    return optax.tree.norm(policy_of(grads)), optax.tree.norm(grads)


def apply(state: TrainState, grads: Any, cfg: OptimConfig, frozen: bool = False) -> TrainState:
    """One step of the optimiser.

    `state` is consumed; the next one lies on the devices as it did. With `frozen` prediction
    modules keep their weights, and the policy's are the same bits as without.
    """
    return _apply(state, grads, cfg, frozen)


@partial(jax.jit, static_argnames=("cfg", "frozen"), donate_argnames=("state",))
def _apply(state: TrainState, grads: Any, cfg: OptimConfig, frozen: bool) -> TrainState:
    updates, opt_state = optimizer(cfg).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    if frozen:
        params |= {"mtp": state.params["mtp"]}
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state)


def update(
    state: TrainState,
    parts: Sequence[MicroBatch],
    cfg: StepConfig,
    gather: Callable[[Any, Sequence[MicroBatch], StepConfig], Gathered] = gather,
    base: Any = None,
    judge: Judge | None = None,
) -> tuple[TrainState, Updated]:
    """One update of `state`, which it consumes, from the micro-batches of a step.

    `gather` sums their gradients. With a `base`, which stays as it is, `state` is of its
    adapters. Nothing is stepped, and `state` comes back as it is, without a trained occurrence,
    where loss or gradients are not finite, and where `judge` says so.
    """
    if not any(forest_of(part).n_occurrences for part in parts):
        return state, Updated(
            stepped=False,
            loss=0.0,
            grad_norm=0.0,
            metrics={},
            logp=np.zeros(0, np.float32),
            index=np.zeros(0, np.int64),
            seconds=0.0,
        )
    # One program of gradients, whether modules are frozen or not: the policy gets the same bits.
    measured = replace(cfg, mtp=replace(cfg.mtp, frozen=False))
    found = gather(tuned(base, state.params), parts, measured)
    norm, whole = map(float, jax.device_get(norms(found.grads)))
    skipped: Skip | None = Skip.NON_FINITE
    if math.isfinite(found.loss) and math.isfinite(whole):
        skipped = judge(found, norm) if judge is not None else None
    if skipped is None:
        state = stepped(state, found, cfg)
    return state, Updated(
        stepped=skipped is None,
        skipped=skipped,
        loss=found.loss,
        grad_norm=norm,
        metrics=found.metrics.values(),
        logp=found.logp,
        index=found.index,
        seconds=found.seconds,
    )


def stepped(state: TrainState, found: Gathered, cfg: StepConfig) -> TrainState:
    """The state after the step that `found` leads to; consumes `state`."""
    state = apply(state, found.grads, cfg.optim, cfg.mtp.frozen)
    if cfg.moe.balance != "bias":
        return state
    return replace(state, params=balance.shift(state.params, found.metrics.load, cfg.moe.rate))


def computed_tokens(part: MicroBatch) -> int:
    """Tokens that pass through the layers, padding included; a carried tree's count once."""
    return carry.padded_tokens(part) if isinstance(part, CarriedTree) else len(part.tokens)


def executed_area(part: MicroBatch, cfg: StepConfig) -> int:
    """(query, key) pairs in the tiles that attention visits, for one head of one layer."""
    if isinstance(part, CarriedTree):
        return carry.executed_area(part, cfg)
    if cfg.attention == "reference":
        return len(part.tokens) ** 2
    return executed_pairs(to_batch(part, cfg).plan)


def scatter(values: np.ndarray, index: np.ndarray, length: int) -> np.ndarray:
    """`values` [M] at their places `index` [M] among `length` tokens, 0 elsewhere."""
    flat = np.zeros(length, values.dtype)
    flat[index] = values
    return flat
