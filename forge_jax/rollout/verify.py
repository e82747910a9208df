"""Verification that no drafter can be seen through: drafts save work and change nothing.

Logits of a window of drafted tokens flow in, sampled tokens flow out. Invariant: every token is
drawn from its own logits exactly as without drafts, with the request's own randomness at its
position; a draft decides only whether the logits after it are worth anything, which they are
where it is the token that was drawn (arXiv 2408.07978).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# (logits [B, V], slots) -> (slots after a token each, packet [B, C]). Rows that are not active
# stay as they are and have nothing in their packet.
Draw = Callable[[Array, Any], tuple[Any, Array]]
NO_DRAFT = -1  # in place of a token: none is proposed


def verified(
    logits: Float[Array, "W B V"], drafts: Int[Array, "B W-1"], slots: Any, draw: Draw
) -> tuple[Any, Int[Array, "W B C"]]:
    """Draws the tokens of a window in order, as long as the drafts agree with them.

    ``logits[t]`` are those after the newest token and t drafts. `slots` has `token` and
    `active` by row and whatever else `draw` keeps. A row draws its t-th token if its first t
    drafts were what it drew and it goes on after them; else it is done with the window.
    """
    missing = jnp.full((1, drafts.shape[0]), NO_DRAFT, drafts.dtype)
    proposed = jnp.concatenate([drafts.T, missing])  # [W, B]

    def one(carry: tuple[Any, Array], at: tuple[Array, Array]) -> tuple[tuple[Any, Array], Array]:
        slots, agrees = carry
        here, draft = at
        live = slots.active & agrees
        after, packet = draw(here, dataclasses.replace(slots, active=live))
        active = jnp.where(live, after.active, slots.active)
        agrees = live & after.active & (after.token == draft)
        return (dataclasses.replace(after, active=active), agrees), packet

    (slots, _), packets = jax.lax.scan(one, (slots, slots.active), (logits, proposed))
    return slots, packets
