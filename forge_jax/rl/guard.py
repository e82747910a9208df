"""Protection of the weights: which steps are not taken, and when a run of them ends training.

Gradients and log-probs of a step go in before the optimiser sees them, a reason to skip it or
none comes out. All of it follows from numbers that the processes of a mesh hold alike, so they
decide alike; what it remembers of earlier steps is in their rows of metrics, so a resumed run
decides as it would have.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from forge_jax.config import ProtectConfig, Skip, UserError
from forge_jax.rl.staleness import effective, k3, log_ratios
from forge_jax.rl.state import policy_of
from forge_jax.rl.step import Gathered, Judge, Updated
from forge_jax.types import Sample

logger = logging.getLogger(__name__)

NORMS = 32  # steps taken whose gradient norms give the median
FEWEST_NORMS = 8  # before there are so many, none is a spike


class Guard:
    """Judges steps by `ProtectConfig`, and counts batches in a row of which none was taken."""

    def __init__(self, cfg: ProtectConfig, rows: Sequence[Mapping[str, Any]] = ()):
        """`rows` are the metrics of the updates before, oldest first."""
        self._cfg = cfg
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._in_a_row = 0  # batches of which every update was skipped
        self._taken = False  # an update of this batch
        self._skipped: str | None = None  # why an update of this batch was, if one was
        self._last: str | None = None  # ... the newest of those batches
        self._gradient: Any = None  # of the step before, with `cosine`
        self._cosine: float | None = None
        for row in rows:
            whole = (row["stepped"], row.get("skipped"), row.get("grad_norm"))
            for stepped, skipped, norm in row.get("judged", [whole]):
                self._count(stepped, skipped, norm)
            self._end_batch()

    def judge(self, samples: Sequence[Sample]) -> Judge:
        """Why a step of `samples` is not to be taken, None if it is, as `step.update` asks."""

        def judged(found: Gathered, norm: float) -> Skip | None:
            delta = log_ratios(samples, found.logp, found.index)
            if not np.all(np.isfinite(delta)):  # of which a cap may have left nothing to see
                return Skip.NON_FINITE
            self._compare(found.grads)
            return self._beyond(effective(delta), k3(delta), norm)

        return judged

    def _beyond(self, ess: float, kl: float, norm: float) -> Skip | None:
        cfg = self._cfg
        if cfg.least_ess is not None and ess < cfg.least_ess:
            return Skip.ESS
        if cfg.most_kl is not None and kl > cfg.most_kl:
            return Skip.KL
        if cfg.norm_spike is None or len(self._norms) < FEWEST_NORMS:
            return None
        return Skip.GRAD_NORM if norm > cfg.norm_spike * np.median(self._norms) else None

    def _compare(self, grads: Any) -> None:
        """Measures the cosine to the gradient before, and keeps this one in its place."""
        if self._cfg.cosine is None:
            return
        before, self._gradient = self._gradient, policy_of(grads)
        self._cosine = None if before is None else float(cosine(before, self._gradient))
        if self._cosine is not None and self._cosine > self._cfg.cosine:
            logger.warning(
                "the gradient has cosine %.3f to the one before, above protect.cosine=%g",
                self._cosine,
                self._cfg.cosine,
            )

    def row(self, done: Updated) -> dict[str, Any]:
        """Takes note of an update, and gives its columns of a row of metrics."""
        self._count(done.stepped, done.skipped, done.grad_norm)
        measured = {} if self._cosine is None else {"grad_cosine": self._cosine}
        self._cosine = None
        return {"skipped": done.skipped, **measured}

    def _count(self, stepped: bool, skipped: str | None, norm: float | None) -> None:
        if stepped:
            self._taken = True
            if norm is not None:
                self._norms.append(norm)
        elif skipped is not None:
            self._skipped = skipped

    def _end_batch(self) -> None:
        # Once a batch has moved the policy beyond a limit the rest of it is skipped, too, and the
        # next one is sampled anew: so updates in a row say nothing.
        if self._taken:
            self._in_a_row = 0
        elif self._skipped is not None:
            self._in_a_row, self._last = self._in_a_row + 1, self._skipped
        self._taken, self._skipped = False, None

    def check(self) -> None:
        """Ends a batch. Raises UserError where none of the last ones taught anything."""
        self._end_batch()
        if self._in_a_row >= self._cfg.most_skipped:
            raise UserError(
                f"protect.most_skipped={self._cfg.most_skipped} batches in a row were skipped, "
                f"the last because of {self._last}: nothing is learnt any more; see `skipped` in "
                "metrics.jsonl"
            )


def judged(found: Sequence[Updated]) -> dict[str, Any]:
    """What a row of metrics says of each update of a batch, where it had several: whether it was
    taken, why not, and, of those taken, the norm of the gradient."""
    if len(found) == 1:
        return {}
    each = [[one.stepped, one.skipped, one.grad_norm if one.stepped else None] for one in found]
    return {"judged": each}


@jax.jit
def cosine(a: Any, b: Any) -> Float[Array, ""]:
    """Of two gradients, all parameters as one vector."""
    return optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b))
