"""What the device computes of one micro-batch: from its arrays to the log-probs.

A micro-batch and parameters go in; log-prob and entropy of every occurrence come out, of which
`forge_jax.rl.terms` makes the loss.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from forge_jax.attention.plan import TilePlan, tree_plan
from forge_jax.attention.tree import default_tile, layout_of, tree_attention
from forge_jax.collectives import Axes, whole
from forge_jax.config import LoraConfig, LossConfig, MoeConfig, MtpConfig, OptimConfig, PackConfig
from forge_jax.models import mtp as modules
from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.lora import adapt
from forge_jax.models.remat import named
from forge_jax.models.transformer import Attend, Ready
from forge_jax.rl import mtp, ranks
from forge_jax.rl.logprob import CHUNK_LOGITS, DEVICE_LOGITS, cut_edge_logprob
from forge_jax.rl.losses import Loss, cispo
from forge_jax.rl.supports import Supports, to_device
from forge_jax.sched.ladder import bucket
from forge_jax.trees import pytree
from forge_jax.types import PackedTree

TILES_GROWTH = 4  # from rung to rung of the padded length of a tile list, whose padding is free


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What is compiled into a train step."""

    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: Loss = cispo
    objective: LossConfig = field(default_factory=LossConfig)  # what `loss` and its average know
    ratio_cap: float = 5.0
    tile: int = 64  # side of an attention tile
    attention: str = "auto"  # implementation, see `tree_attention`
    remat: str = "none"  # what layers keep for the backward pass, see `forge_jax.models.remat`
    dtype: str = "float32"  # of the layers; head, softmax and loss are at least float32
    mtp: MtpConfig = field(default_factory=MtpConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@pytree
class Batch:
    """A micro-batch as the device sees it; fields as in `PackedTree` unless said."""

    tokens: jax.Array | np.ndarray  # i32[N]
    depth: jax.Array | np.ndarray  # i32[N]
    parent: jax.Array | np.ndarray | None  # i32[N], among all ranks' tokens; None where carried
    source: jax.Array | np.ndarray  # i32[E], token whose hidden state predicts the edge
    label: jax.Array | np.ndarray  # i32[E], id that it predicts
    temperature: jax.Array | np.ndarray  # f32[E]
    support: Supports | None  # of the edges; None: of none
    occurrence_edge: jax.Array | np.ndarray  # i32[M]
    old_logp: jax.Array | np.ndarray  # f32[M]
    advantage: jax.Array | np.ndarray  # f32[M]
    weight: jax.Array | np.ndarray  # f32[M]
    others: dict[str, jax.Array | np.ndarray]  # f32[M] each
    multiplicity: jax.Array | np.ndarray  # f32[N]
    routes: jax.Array | np.ndarray | None  # int[N, layers, k]
    plan: TilePlan


@pytree
class Found:
    """What a forward pass finds."""

    logp: jax.Array  # f32[M], log-prob of each occurrence
    entropy: jax.Array  # f32[M]
    h: jax.Array  # [N, E], final-normed hidden state of each token
    own: Any  # with a context: the tokens' keys and values [layers, N, K, D], as wide as it is
    routing: Any  # `moe.Routing` with a leading layer axis; None without experts
    guess: mtp.Guess | None  # of the edges, where modules are trained


def tiled(pack: PackConfig, attention: str, dtype: str) -> PackConfig:
    """`pack` with the tile that suits the attention of layers of `dtype`, unless it has one.

    Raises UserError for an unknown implementation.
    """
    return replace(pack, tile=pack.tile or default_tile(attention, dtype)[0])


def to_batch(tree: PackedTree, cfg: StepConfig) -> Batch:
    """Numpy arrays of a padded tree and the tiles its attention visits."""
    smallest = 4 * -(-len(tree.tokens) // cfg.tile)  # what many small trees need at most

    def rung(listed: int) -> int:
        return bucket(listed, smallest, TILES_GROWTH, 1)

    plan = tree_plan(
        tree.exit, tile=cfg.tile, layout=layout_of(cfg.attention, cfg.dtype), bucket=rung
    )
    return Batch(
        tokens=tree.tokens,
        depth=tree.depth,
        parent=tree.parent,
        source=tree.parent[tree.edge_token],
        label=tree.tokens[tree.edge_token],
        temperature=tree.edge_temperature,
        support=to_device(tree.edge_support),
        occurrence_edge=tree.occurrence_edge,
        old_logp=tree.old_logp,
        advantage=tree.advantage,
        weight=tree.weight,
        others=dict(tree.others),
        multiplicity=tree.multiplicity,
        routes=tree.routes,
        plan=plan,
    )


def occurrences(
    params: Any, batch: Batch, cfg: StepConfig, mesh: Mesh | None = None, context: Any = None
) -> Found:
    """One forward pass over a micro-batch.

    The gather from edges to occurrences is where targets stay apart; its transpose sums
    the gradients of all samples that share an edge.

    `mesh` is that of the enclosing map over all its ranks, see `differentiate`. `context` is
    keys and values [layers, S, K, D] each, at least float32, of tokens that the plan has before
    the own ones.
    """
    params = adapt(params, cfg.lora)
    ready = ranks.ready(cfg.model, cfg.dtype, mesh, cfg.lora)
    shared = ranks.over(mesh, "context")
    attend = _attention(batch, cfg, shared)
    tokens, depth = jnp.asarray(batch.tokens), jnp.asarray(batch.depth)
    routes = None if batch.routes is None else jnp.moveaxis(jnp.asarray(batch.routes), 1, 0)
    h, own, routing = transformer.hidden(
        params,
        tokens,
        depth,
        attend,
        cfg.model,
        context,
        remat=cfg.remat,
        ready=ready,
        routes=routes,
        multiplicity=jnp.asarray(batch.multiplicity),
    )
    logp, entropy = _edges(params, h, batch, cfg, ready)
    edge = batch.occurrence_edge
    return Found(
        logp=logp[edge],
        entropy=entropy[edge],
        h=h,
        own=own,
        routing=routing,
        guess=_guess(params, h, batch, attend, cfg, ready, shared) if cfg.mtp.weight else None,
    )


def _attention(batch: Batch, cfg: StepConfig, shared: Axes) -> Attend:
    """Queries of a rank against the keys of the micro-batch, whose tokens are cut over the axes
    `shared`, and against those before them, which a layer's cache has."""
    scale = cfg.model.head_dim**-0.5

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        k, v = (named(whole(x, shared, wide=True), "keys") for x in (k, v))
        if cache is not None:
            (keys, values), cache = cache, (k.astype(cache[0].dtype), v.astype(cache[1].dtype))
            k, v = jnp.concatenate([keys, cache[0]]), jnp.concatenate([values, cache[1]])
        o, _ = tree_attention(q, k, v, batch.plan, scale=scale, implementation=cfg.attention)
        return o, cache

    return attend


def _edges(
    params: Any, h: Array, batch: Batch, cfg: StepConfig, ready: Ready
) -> tuple[Float[Array, " E"], Float[Array, " E"]]:
    """Log-prob and entropy of the edges."""
    return cut_edge_logprob(
        h,
        transformer.unembedding(params, cfg.model, ready),
        jnp.asarray(batch.source),
        jnp.asarray(batch.label),
        jnp.asarray(batch.temperature),
        support=batch.support,
        axes=ready.cut.tensor,
        vocab=cfg.model.vocab,
        logits=DEVICE_LOGITS if layout_of(cfg.attention, cfg.dtype) == "tiles" else CHUNK_LOGITS,
    )


def _guess(
    params: Any,
    h: Array,
    batch: Batch,
    attend: Attend,
    cfg: StepConfig,
    ready: Ready,
    shared: Axes,
) -> mtp.Guess:
    """What the modules make of the edges; no gradient leaves them. The tokens of a micro-batch
    are cut over the axes `shared`."""

    def above(state: Array) -> Array:
        return whole(state, shared)[batch.parent]

    states = modules.states(
        params,
        h,
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.depth),
        above,
        attend,
        cfg.model,
        remat=cfg.remat,
        ready=ready,
    )
    w = transformer.unembedding(params, cfg.model, ready)
    edges = jnp.asarray(batch.source), jnp.asarray(batch.temperature)
    cut = ready.cut.tensor if w.shape[1] < cfg.model.vocab else ()
    return mtp.guesses(h, states, w, *edges, cfg.mtp, axes=cut)
