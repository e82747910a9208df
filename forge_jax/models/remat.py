"""What layers keep from their forward to their backward pass, by name.

A layer's function goes in; one of the same values comes out, whose backward pass computes
again what is not kept. "none": nothing that was computed is computed again. "block": only the
residual stream between layers is kept. "attention": also queries, keys, values and what attention
made of them, the part whose recomputation costs most on long contexts. "offload": only the
residual stream, in the memory of the host.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from forge_jax.config import REMAT

# Results of these are made again from what they were made of: a weight that was lent, cast or
# laid out otherwise is not kept, nor is any other array twice.
MOVES = frozenset(
    {"all_gather", "convert_element_type", "reshape", "transpose", "squeeze", "slice"}
)


def named(x: Array, name: str) -> Array:
    """`x`, under a name that policies know: "stream", "attention" or "keys"."""
    return checkpoint_name(x, name)


def remembering(
    layer: Callable[..., Any], remat: str, lent: bool, scanned: bool
) -> Callable[..., Any]:
    """`layer` under the policy `remat`; with `lent` its weights are in no case kept.

    Raises ValueError on an unknown name.
    """
    if remat not in REMAT:
        raise ValueError(f"{remat=} must be one of {REMAT}")
    if remat == "none" and not lent:
        return layer
    # Inside a scan nothing can merge the recomputation with the forward pass anyway.
    return jax.checkpoint(layer, policy=_policy(remat), prevent_cse=not scanned)


def _policy(remat: str) -> Callable[..., Any] | None:
    if remat == "none":
        return lambda primitive, *_, **params: not _moves(primitive.name, params)
    if remat == "attention":
        return policies.save_only_these_names("attention")
    if remat == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["stream"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return None


def _moves(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation moves values alone; one with a backward pass of its own, if all that
    it consists of does."""
    if name == "custom_vjp_call":
        return all(_moves(e.primitive.name, e.params) for e in params["call_jaxpr"].eqns)
    return name in MOVES
