"""Attention where heads may be cut over ranks: each attends with its own heads.

Queries, keys and values of all heads flow in, inside a `shard_map` over other axes; outputs
of all heads flow out. The compiler cannot cut a kernel, so no axis is left to it.
"""

import jax
from jaxtyping import Array, Float

from forge_jax.attention.plan import TilePlan
from forge_jax.attention.tree import tree_attention

AXES = frozenset({"fsdp", "tensor"})


def cut_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    plan: TilePlan,
    *,
    scale: float,
    implementation: str,
    axes: frozenset[str],
) -> Float[Array, "T H D"]:
    """The output of `tree_attention`. `axes` are those of more than one device; where "tensor"
    is among them and divides the key heads, each of its ranks has a part of the heads. Over
    "fsdp", and where it does not divide, every rank has all."""

    def attend(q: Array, k: Array, v: Array, plan: TilePlan) -> Array:
        return tree_attention(q, k, v, plan, scale=scale, implementation=implementation)[0]

    left = axes & AXES
    if not left:
        return attend(q, k, v, plan)
    ranks = jax.sharding.get_abstract_mesh().shape["tensor"]
    heads = jax.P(None, "tensor") if k.shape[1] % ranks == 0 and ranks > 1 else jax.P()
    return jax.shard_map(
        attend,
        in_specs=(heads, heads, heads, jax.P()),
        out_specs=heads,
        axis_names=left,
        check_vma=False,  # as in `forge_jax.rl.parallel`
    )(q, k, v, plan)
