"""Weights that reach the engine late, by a number of updates and not by a clock.

Every version of the trainer's weights goes in, in order; what the engine is to sample from next
comes out, the version that many updates before. So staleness is forced, and repeats to the bit.
"""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp


class Held:
    """Keeps copies of the newest weights until it is their turn."""

    def __init__(self, late: int, last: int):
        """`late` updates, but version `last` at once; weights on time go through uncopied."""
        self._late, self._last = late, last
        self._kept: deque[tuple[int, Any]] = deque()

    def due(self, version: int, weights: Any) -> tuple[int, Any] | None:
        """What to sample from once `version` is trained; None: what is sampled from already.

        The caller may donate `weights` afterwards, unless they are what is given back.
        """
        if not self._late or version == self._last:
            return version, weights
        self._kept.append((version, _copied(weights)))
        return self._kept.popleft() if len(self._kept) > self._late else None


@jax.jit
def _copied(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)
