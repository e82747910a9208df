"""Exact gradients of a tree beyond the budget, block by block of its depth-first order.

A `CarriedTree` and parameters go in; what `step.gradients` gives for a micro-batch comes out
for every block. A forward pass over the trunk, the tokens that later blocks read, keeps their
keys and values; then the blocks are computed in reverse order, with the keys and values of
their ancestors as inputs. Their gradients are added up, in at least float32, where the blocks
that own them find them: the sum over the blocks is the gradient of the whole tree, wherever
it is cut. What is computed twice is the trunk, forward.

On a mesh every place computes the same blocks, with heads, hidden units and words cut over
"tensor" and weights lent as in `forge_jax.rl.parallel`; the gradient counts once.

Beside one block's work the device holds keys and values [2, layers, tokens, K, D] of the
trunk, the tokens above the block borders, in the dtype of the layers; their gradients in
float32; and both again for the context of the block, at most one path.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from forge_jax.attention.plan import build_plan, executed_pairs
from forge_jax.attention.tree import layout_of
from forge_jax.config import UserError
from forge_jax.models.lora import trained_of, with_trained
from forge_jax.rl import ranks
from forge_jax.rl.forward import (
    TILES_GROWTH,
    Batch,
    StepConfig,
    occurrences,
)
from forge_jax.rl.losses import Metrics
from forge_jax.rl.prefetch import prefetch
from forge_jax.rl.supports import to_device
from forge_jax.rl.terms import share_of_experts, share_of_loss
from forge_jax.sched.blocks import Block, Blocks, block, lay_out, trunk_block
from forge_jax.sched.ladder import bucket
from forge_jax.sharding import WORK
from forge_jax.types import CarriedTree

SLOTS_GROWTH = 1.25  # from rung to rung of the number of tokens kept
FEWEST_SLOTS = 256

Kept = Float[Array, "2 layers slots K D"]  # keys and values, or their gradients


class Ready(NamedTuple):
    """A block as the device sees it, numpy arrays throughout."""

    block: Block
    batch: Batch


def gradients(
    params: Any, tree: CarriedTree, denominator: float, cfg: StepConfig, mesh: Mesh | None = None
) -> Iterator[tuple[np.ndarray, Any, Metrics, Float[Array, " M"], Float[Array, " M"]]]:
    """For each block the places of its occurrences, -1 at padding, then the gradients of its
    share of the loss, metrics, log-probs and terms, as `step.gradients` gives them; gradients
    of keys and values that cross a block are in those of the block that owns them. `mesh` is
    that of `params`."""
    blocks = lay_out(tree)
    kept = _trunk(params, blocks, cfg, mesh)
    d_kept = _nothing(blocks, cfg, _wide(cfg), mesh)
    backward = range(blocks.number - 1, -1, -1)
    for one, batch in prefetch(lambda n: to_ready(block(blocks, n), cfg), backward):
        context = _read(kept, one.context, _wide(cfg), mesh)
        d_own = _read(d_kept, one.slot, _wide(cfg), mesh)
        grads, d_context, *beside = _gradients(
            params, batch, context, d_own, denominator, cfg, mesh
        )
        # Or the blocks to come would be allocated at once.
        d_kept = jax.block_until_ready(_add(d_kept, one.context, d_context, mesh))
        yield one.occurrence_index, grads, *beside


def logprobs(
    params: Any, tree: CarriedTree, cfg: StepConfig, mesh: Mesh | None = None
) -> Iterator[tuple[np.ndarray, Float[Array, " M"]]]:
    """For each block the places of its occurrences, -1 at padding, and their log-probs."""
    blocks = lay_out(tree)
    kept = _trunk(params, blocks, cfg, mesh)
    for one, batch in prefetch(lambda n: to_ready(block(blocks, n), cfg), range(blocks.number)):
        context = _read(kept, one.context, _wide(cfg), mesh)
        logp = _logprobs(params, batch, context, cfg, mesh)
        yield one.occurrence_index, jax.block_until_ready(logp)


def _trunk(params: Any, blocks: Blocks, cfg: StepConfig, mesh: Mesh | None) -> Kept:
    """Keys and values of the tokens that later blocks read."""
    kept = _nothing(blocks, cfg, cfg.dtype, mesh)
    numbers = range(blocks.trunk_number)
    for one, batch in prefetch(lambda n: to_ready(trunk_block(blocks, n), cfg), numbers):
        context = _read(kept, one.context, _wide(cfg), mesh)
        new = _keys(params, batch, context, cfg, mesh)
        kept = jax.block_until_ready(_write(kept, one.slot, new, mesh))
    return kept


def to_ready(one: Block, cfg: StepConfig) -> Ready:
    """A block and the tiles that its queries visit among the keys of context and block.

    Raises UserError where prediction modules are to be trained on it.
    """
    if cfg.mtp.weight:
        raise UserError(
            f"mtp.weight={cfg.mtp.weight}: prediction modules are not carried from block to block, "
            "and a path is longer than pack.budget; raise pack.budget or take mtp.weight=0"
        )
    k_id = np.concatenate([one.context_id, one.id])
    smallest = 4 * -(-len(k_id) // cfg.tile)  # as of a micro-batch of so many tokens
    plan = build_plan(
        one.id,
        k_id,
        np.concatenate([one.context_exit, one.exit]),
        tile=cfg.tile,
        layout=layout_of(cfg.attention, cfg.dtype),
        bucket=lambda listed: bucket(listed, smallest, TILES_GROWTH, 1),
    )
    batch = Batch(
        tokens=one.tokens,
        depth=one.depth,
        parent=None,
        source=one.source,
        label=one.label,
        temperature=one.temperature,
        support=to_device(one.support),
        occurrence_edge=one.occurrence_edge,
        old_logp=one.old_logp,
        advantage=one.advantage,
        weight=one.weight,
        others=dict(one.others),
        multiplicity=one.multiplicity,
        routes=one.routes,
        plan=plan,
    )
    return Ready(one, batch)


def padded_tokens(tree: CarriedTree) -> int:
    """Tokens of all blocks."""
    return int(tree.sizes.sum())


def kept_bytes(tree: CarriedTree, cfg: StepConfig) -> int:
    """Of keys, values and their gradients that are held for all blocks together."""
    blocks = lay_out(tree)
    kept, d_kept = (_shape(blocks, cfg, dtype) for dtype in (cfg.dtype, _wide(cfg)))
    return kept.size * kept.dtype.itemsize + d_kept.size * d_kept.dtype.itemsize


def executed_area(tree: CarriedTree, cfg: StepConfig) -> int:
    """(query, key) pairs in the tiles that one pass over all blocks visits, for one head."""
    blocks = lay_out(tree)
    ready = (to_ready(block(blocks, number), cfg) for number in range(blocks.number))
    if cfg.attention == "reference":
        return sum(len(one.id) * (len(one.id) + len(one.context)) for one, _ in ready)
    return sum(executed_pairs(batch.plan) for _, batch in ready)


def _wide(cfg: StepConfig) -> Any:
    return jnp.promote_types(cfg.dtype, jnp.float32)


def _shape(blocks: Blocks, cfg: StepConfig, dtype: Any) -> jax.ShapeDtypeStruct:
    model = cfg.model
    slots = bucket(len(blocks.trunk), FEWEST_SLOTS, SLOTS_GROWTH, 1)
    shape = (2, model.layers, slots, model.kv_heads, model.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _nothing(blocks: Blocks, cfg: StepConfig, dtype: Any, mesh: Mesh | None) -> Kept:
    kept = _shape(blocks, cfg, dtype)
    where = None if mesh is None else NamedSharding(mesh, _cut(mesh))
    return jnp.zeros(kept.shape, kept.dtype, device=where)


def _cut(mesh: Mesh | None) -> jax.P:
    """How keys and values [2, layers, slots, K, D] are cut: as heads are."""
    return jax.P(None, None, None, ranks.over(mesh, "tensor") or None)


@partial(jax.jit, static_argnames=("dtype", "mesh"))
def _read(
    kept: Kept, slot: Int[Array, " S"], dtype: Any, mesh: Mesh | None
) -> Float[Array, "2 layers S K D"]:
    """What lies in `slot`; 0 where that is past the last one."""

    def rank(kept: Array, slot: Array) -> Array:
        return kept.at[:, :, slot].get(mode="fill", fill_value=0).astype(dtype)

    return ranks.mapped(rank, mesh, (_cut(mesh), jax.P()), _cut(mesh))(kept, slot)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("kept",))
def _write(
    kept: Kept, slot: Int[Array, " S"], new: Float[Array, "2 layers S K D"], mesh: Mesh | None
) -> Kept:
    def rank(kept: Array, slot: Array, new: Array) -> Array:
        return kept.at[:, :, slot].set(new.astype(kept.dtype), mode="drop")

    cut = _cut(mesh)
    return ranks.mapped(rank, mesh, (cut, jax.P(), cut), cut)(kept, slot, new)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("kept",))
def _add(
    kept: Kept, slot: Int[Array, " S"], new: Float[Array, "2 layers S K D"], mesh: Mesh | None
) -> Kept:
    def rank(kept: Array, slot: Array, new: Array) -> Array:
        return kept.at[:, :, slot].add(new, mode="drop")

    cut = _cut(mesh)
    return ranks.mapped(rank, mesh, (cut, jax.P(), cut), cut)(kept, slot, new)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def _keys(
    params: Any, batch: Batch, context: Array, cfg: StepConfig, mesh: Mesh | None = None
) -> Array:
    """Keys and values [2, layers, N, K, D] of a block's tokens."""

    def rank(params: Any, batch: Batch, context: Array) -> Array:
        return jnp.stack(occurrences(params, batch, cfg, mesh, tuple(context)).own)

    return ranks.mapped(rank, mesh, _takes(cfg, mesh), _cut(mesh))(params, batch, context)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def _logprobs(
    params: Any, batch: Batch, context: Array, cfg: StepConfig, mesh: Mesh | None = None
) -> Array:
    def rank(params: Any, batch: Batch, context: Array) -> Array:
        return occurrences(params, batch, cfg, mesh, tuple(context)).logp

    return ranks.mapped(rank, mesh, _takes(cfg, mesh), jax.P())(params, batch, context)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames=("context",))
def _gradients(
    params: Any,
    batch: Batch,
    context: Array,
    d_own: Array,
    denominator: Array,
    cfg: StepConfig,
    mesh: Mesh | None = None,
) -> tuple[Any, Array, Metrics, Array, Array]:
    """Gradients by parameters and context, of the block's share of the loss and of what the
    later blocks make of its keys and values, whose gradient there is `d_own`."""

    def rank(params: Any, batch: Batch, context: Array, d_own: Array, denominator: Array) -> Any:
        def objective(trained: Any, context: Array) -> tuple[Array, tuple[Metrics, Array, Array]]:
            found = occurrences(with_trained(params, trained), batch, cfg, mesh, tuple(context))
            share, (metrics, logp, terms) = share_of_loss(
                found.logp, found.entropy, batch, denominator, cfg
            )
            if found.routing is not None:
                more, load = share_of_experts(found.routing, batch, denominator, cfg)
                share, metrics = share + more, replace(metrics, load=load)
            return share + jnp.vdot(jnp.stack(found.own), d_own), (metrics, logp, terms)

        (grads, d_context), beside = jax.grad(objective, argnums=(0, 1), has_aux=True)(
            trained_of(params), context
        )
        return _once(grads, cfg, mesh), d_context, *beside

    every = jax.P()
    takes = (*_takes(cfg, mesh), _cut(mesh), every)
    trained = None if mesh is None else ranks.trained_specs(cfg.model, mesh, cfg.lora)
    gives = (trained, _cut(mesh), every, every, every)
    return ranks.mapped(rank, mesh, takes, gives)(params, batch, context, d_own, denominator)


def _takes(cfg: StepConfig, mesh: Mesh | None) -> tuple[Any, jax.P, jax.P]:
    """How parameters, a block and its context are cut."""
    return None if mesh is None else ranks.specs(cfg.model, mesh, cfg.lora), jax.P(), _cut(mesh)


def _once(grads: Any, cfg: StepConfig, mesh: Mesh | None) -> Any:
    """Gradients of what all places computed alike, counted once."""
    if mesh is None:
        return grads
    copies = math.prod(mesh.shape[axis] for axis in WORK)
    return jax.tree.map(lambda g: g / copies, ranks.summed(grads, cfg.model, mesh, cfg.lora))
