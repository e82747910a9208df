"""Multi-token prediction modules: from what is known of a token's parent, one token further.

Final hidden states and the tokens of trees flow in; for every depth k one state a token flows
out, from which the model's own unembedding predicts the token after the next k. No gradient
leaves the modules: hidden states, embedding and unembedding are data to them.

DeepSeek-V3, arXiv 2412.19437, section 2.2, written for trees: where a sequence has the state of
the token before, a node has that of its parent.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.collectives import UNCUT, Cut
from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import accumulator, linear, rms_norm, rotation
from forge_jax.models.layout import draw, modules_layout
from forge_jax.models.load import LoadedModel
from forge_jax.models.remat import remembering
from forge_jax.models.transformer import AS_STORED, Attend, Ready, block, embedded
from forge_jax.sharding import mesh_of, shardings

GROWN = 0x6D74  # folded into the seed of fresh modules, apart from that of the model


def states(
    params: dict[str, Any],
    h: Float[Array, "N E"],
    tokens: Int[Array, " N"],
    depth: Int[Array, " N"],
    above: Callable[[Array], Array],
    attend: Attend,
    cfg: ModelConfig,
    *,
    remat: str = "none",
    ready: Ready = AS_STORED,
) -> Float[Array, "modules N E"]:
    """Final-normed states of all modules at every token.

    With ``g_0 = h``, module k gives token j the state ``g_k[j] = block(W [norm(embed[j]);
    norm(g_{k-1}[parent of j])])``, whose attention sees what the model's does: `attend`
    and the positions `depth` are the model's. `above` is the gather along parents. A token of
    depth < k has no k-th ancestor: its previous state is 0.
    """
    fixed = jax.lax.stop_gradient({**params, "mtp": None})
    word = jax.lax.stop_gradient(embedded(fixed, tokens, cfg, ready))
    turned = rotation(depth, cfg, accumulator(h))

    def module(state: Array, x: tuple[Any, Array]) -> tuple[Array, Array]:
        weights, k = ready.module(x[0]), x[1]
        before = jnp.where((depth >= k)[:, None], above(state), 0)
        g, normed, _ = advanced(weights, word, before, turned, attend, cfg, cut=ready.cut)
        return g, normed

    module = remembering(module, remat, ready.lent, scanned=True)
    over = (params["mtp"], jnp.arange(1, cfg.mtp + 1))
    return jax.lax.scan(module, jax.lax.stop_gradient(h), over)[1]


def advanced(
    weights: dict[str, Any],
    word: Float[Array, "... T E"],
    before: Float[Array, "... T E"],
    turned: Float[Array, "2 ... T 1 R"],
    attend: Attend,
    cfg: ModelConfig,
    cache: Any = None,
    *,
    cut: Cut = UNCUT,
) -> tuple[Float[Array, "... T E"], Float[Array, "... T E"], Any]:
    """One module's states of tokens, as they are and final-normed, and its new cache, from the
    tokens' embeddings and the states `before` them of the module above."""
    both = (
        rms_norm(word, weights["token_norm"], cfg.norm_eps),
        rms_norm(before, weights["state_norm"], cfg.norm_eps),
    )
    g = linear(jnp.concatenate(both, axis=-1), weights["project"])
    g, (cache, _) = block(g, weights["block"], cache, turned, attend, cfg, cut)
    return g, rms_norm(g, weights["norm"], cfg.norm_eps), cache


def grown(model: LoadedModel, depth: int, seed: int) -> LoadedModel:
    """`model` with `depth` modules, fresh ones from `seed` where it has none; on a mesh each device
    draws its own part.

    Raises UserError where it has another number of them.
    """
    have = model.cfg.mtp
    if have == depth or depth == 0:
        return model
    if have:
        raise UserError(f"mtp.depth={depth}: {model.name} has {have} modules of its own")
    cfg = dataclasses.replace(model.cfg, mtp=depth)
    mesh = mesh_of(model.params)
    where = None if mesh is None else shardings(modules_layout(cfg), mesh)
    made = jax.jit(_fresh, static_argnums=(0, 2), out_shardings=where)
    key = jax.random.fold_in(jax.random.key(seed), GROWN)
    fresh = made(cfg, key, model.params["embed"].dtype)
    return dataclasses.replace(model, cfg=cfg, params={**model.params, "mtp": fresh})


def _fresh(cfg: ModelConfig, key: Array, dtype: Any) -> dict[str, Any]:
    return draw(modules_layout(cfg), key, dtype)
