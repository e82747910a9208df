"""One update of the policy from the micro-batches of a step.

Padded `PackedTree`s and a `TrainState` go in; the next state, metrics and the log-prob of
every trained occurrence come out. The denominator is the number of trained occurrences of
the whole step, fixed before micro-batching, so loss and gradient depend neither on how
samples were merged nor on how trees were packed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from forge_jax.attention.plan import TilePlan, executed_pairs, tree_plan
from forge_jax.attention.tree import layout_of, tree_attention
from forge_jax.config import OptimConfig
from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.rl.context import whole
from forge_jax.rl.logprob import cut_edge_logprob, edge_logprob
from forge_jax.rl.losses import Loss, Metrics, cispo, measure
from forge_jax.rl.state import TrainState, optimizer
from forge_jax.sched.pack import bucket
from forge_jax.trees import pytree
from forge_jax.types import PackedTree

TILES_GROWTH = 4  # from rung to rung of the padded length of a tile list, whose padding is free


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What is compiled into a train step."""

    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: Loss = cispo
    ratio_cap: float = 5.0
    tile: int = 64  # side of an attention tile
    attention: str = "auto"  # implementation, see `tree_attention`
    remat: str = "none"  # see `transformer.hidden`
    dtype: str = "float32"  # of the layers; head, softmax and loss are at least float32


@pytree
class Batch:
    """A micro-batch as the device sees it; fields as in `PackedTree` unless said."""

    tokens: jax.Array | np.ndarray  # i32[N]
    depth: jax.Array | np.ndarray  # i32[N]
    source: jax.Array | np.ndarray  # i32[E], token whose hidden state predicts the edge
    label: jax.Array | np.ndarray  # i32[E], id that it predicts
    temperature: jax.Array | np.ndarray  # f32[E]
    occurrence_edge: jax.Array | np.ndarray  # i32[M]
    old_logp: jax.Array | np.ndarray  # f32[M]
    advantage: jax.Array | np.ndarray  # f32[M]
    weight: jax.Array | np.ndarray  # f32[M]
    plan: TilePlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """What one update came to, on the host."""

    stepped: bool  # False: no occurrence was trained and the state is as it was
    loss: float
    grad_norm: float  # global L2, before clipping
    metrics: dict[str, float]
    logp: np.ndarray  # f32[M] of every trained occurrence, under the weights before the update
    index: np.ndarray  # i64[M], their places in the concatenated samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """The sums over the micro-batches of a step, before any update."""

    grads: Any  # like the parameters, on the device
    loss: float  # summed in float64: large terms of both signs nearly cancel
    metrics: Metrics
    logp: np.ndarray  # as in `Updated`
    index: np.ndarray


def to_batch(tree: PackedTree, cfg: StepConfig) -> Batch:
    """Numpy arrays of a padded tree and the tiles its attention visits."""
    smallest = 4 * -(-len(tree.tokens) // cfg.tile)  # what many small trees need at most

    def rung(listed: int) -> int:
        return bucket(listed, smallest, TILES_GROWTH, 1)

    plan = tree_plan(tree.exit, tile=cfg.tile, layout=layout_of(cfg.attention), bucket=rung)
    return Batch(
        tokens=tree.tokens,
        depth=tree.depth,
        source=tree.parent[tree.edge_token],
        label=tree.tokens[tree.edge_token],
        temperature=tree.edge_temperature,
        occurrence_edge=tree.occurrence_edge,
        old_logp=tree.old_logp,
        advantage=tree.advantage,
        weight=tree.weight,
        plan=plan,
    )


@partial(jax.jit, static_argnames=("cfg", "axes"))
def gradients(
    params: Any,
    batch: Batch,
    denominator: Float[Array, ""],
    cfg: StepConfig,
    axes: frozenset[str] = frozenset(),
) -> tuple[Any, Metrics, Float[Array, " M"], Float[Array, " M"]]:
    """Gradient of a micro-batch's share of the loss, its metrics, and per occurrence the
    log-prob and the term ``weight * loss``.

    The share is the sum of the terms over `denominator`; gradients are in the dtype of
    `params`.

    `axes` are of the enclosing `shard_map`, see `forge_jax.rl.parallel`: with "context" among
    them `batch` is this rank's part of a micro-batch, whose keys are on all ranks; "tensor" is
    not yet mapped over, and the head's vocabulary is to be cut over it.
    """

    def objective(params: Any) -> tuple[jax.Array, tuple[Metrics, jax.Array, jax.Array]]:
        logp, entropy = _occurrences(params, batch, cfg, axes)
        old_logp, advantage, weight = (
            jnp.asarray(x, logp.dtype) for x in (batch.old_logp, batch.advantage, batch.weight)
        )
        each = cfg.loss(logp, old_logp, advantage, cfg.ratio_cap)
        terms = jnp.where(weight > 0, each * weight, 0.0)
        metrics = measure(logp, old_logp, entropy, weight, cfg.ratio_cap)
        return jnp.sum(terms) / denominator, jax.lax.stop_gradient((metrics, logp, terms))

    grads, beside = jax.grad(objective, has_aux=True)(params)
    return grads, *beside


@partial(jax.jit, static_argnames=("cfg",))
def logprobs(params: Any, batch: Batch, cfg: StepConfig) -> Float[Array, " M"]:
    """Log-probs of the occurrences alone, padding included, without a gradient."""
    return _occurrences(params, batch, cfg, frozenset())[0]


def _occurrences(
    params: Any, batch: Batch, cfg: StepConfig, axes: frozenset[str]
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [M] of each occurrence.

    The gather from edges to occurrences is where targets stay apart; its transpose sums
    the gradients of all samples that share an edge.
    """
    scale = cfg.model.head_dim**-0.5

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        if "context" in axes:
            k, v = whole(k, "context"), whole(v, "context")
        o, _ = tree_attention(q, k, v, batch.plan, scale=scale, implementation=cfg.attention)
        return o, cache

    layers = jax.tree.map(lambda p: p.astype(cfg.dtype), params)
    tokens, depth = jnp.asarray(batch.tokens), jnp.asarray(batch.depth)
    h, _ = transformer.hidden(layers, tokens, depth, attend, cfg.model, remat=cfg.remat)
    head = partial(cut_edge_logprob, axis="tensor") if "tensor" in axes else edge_logprob
    logp, entropy = head(
        h,
        transformer.unembedding(params, cfg.model),
        jnp.asarray(batch.source),
        jnp.asarray(batch.label),
        jnp.asarray(batch.temperature),
    )
    edge = batch.occurrence_edge
    return logp[edge], entropy[edge]


@partial(jax.jit, donate_argnames=("sums",))
def _add(sums: tuple[Any, Metrics], part: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
    return jax.tree.map(jnp.add, sums[0], part[0]), sums[1] + part[1]


def gather(params: Any, trees: Sequence[PackedTree], cfg: StepConfig) -> Gathered:
    """Sums gradients and metrics over the micro-batches of one step.

    Raises ValueError if there is no trained occurrence to average over.
    """
    trained = sum(tree.n_occurrences for tree in trees)
    return total(
        (
            (tree.occurrence_index, *gradients(params, to_batch(tree, cfg), float(trained), cfg))
            for tree in trees
        ),
        trained,
    )


def total(parts: Iterable[tuple[np.ndarray, Any, Metrics, Any, Any]], trained: int) -> Gathered:
    """What `gather` gives, from the places of its occurrences, -1 at padding, and the
    `gradients` of each micro-batch. Raises ValueError if `trained` is 0."""
    if trained == 0:
        raise ValueError("no trained occurrence in any micro-batch")
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
    )


def apply(state: TrainState, grads: Any, cfg: OptimConfig) -> tuple[TrainState, Float[Array, ""]]:
    """One step of the optimiser; returns the norm of `grads` before clipping.

    `state` is consumed; the next one lies on the devices as it did.
    """
    where = jax.tree.map(lambda x: x.sharding, state)
    after, norm = _apply(state, grads, cfg)
    # Left to itself the compiler may cut the next state otherwise, and programs compile anew.
    return jax.device_put(after, where), norm


@partial(jax.jit, static_argnames=("cfg",), donate_argnames=("state",))
def _apply(state: TrainState, grads: Any, cfg: OptimConfig) -> tuple[TrainState, Float[Array, ""]]:
    norm = optax.tree.norm(grads)
    updates, opt_state = optimizer(cfg).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), norm


def update(
    state: TrainState,
    trees: Sequence[PackedTree],
    cfg: StepConfig,
    gather: Callable[[Any, Sequence[PackedTree], StepConfig], Gathered] = gather,
) -> tuple[TrainState, Updated]:
    """One update of `state`, which it consumes, from the micro-batches of a step.

    `gather` sums their gradients. Without a trained occurrence nothing is stepped: `state`
    comes back as it is.
    """
    if not any(tree.n_occurrences for tree in trees):
        return state, Updated(
            stepped=False,
            loss=0.0,
            grad_norm=0.0,
            metrics={},
            logp=np.zeros(0, np.float32),
            index=np.zeros(0, np.int64),
        )
    found = gather(state.params, trees, cfg)
    state, norm = apply(state, found.grads, cfg.optim)
    return state, Updated(
        stepped=True,
        loss=found.loss,
        grad_norm=float(norm),
        metrics=found.metrics.values(),
        logp=found.logp,
        index=found.index,
    )


def executed_area(tree: PackedTree, cfg: StepConfig) -> int:
    """(query, key) pairs in the tiles that attention visits, for one head of one layer."""
    if cfg.attention == "reference":
        return len(tree.tokens) ** 2
    return executed_pairs(to_batch(tree, cfg).plan)


def scatter(values: np.ndarray, index: np.ndarray, length: int) -> np.ndarray:
    """`values` [M] at their places `index` [M] among `length` tokens, 0 elsewhere."""
    flat = np.zeros(length, values.dtype)
    flat[index] = values
    return flat
