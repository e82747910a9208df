"""How long somebody has waited for the head of a queue, and what becomes of it then.

Heads and moments flow in, when the patience is over flows out. The invariant: only time in which
somebody waits counts, and another head begins anew. No clock of its own.
"""

import math
from dataclasses import dataclass

from forge_jax.sched.policies import Why


@dataclass(frozen=True, kw_only=True)
class Evicted:
    """An item that will not be trained on."""

    number: int
    why: Why
    again: int | None = None  # the number it has from now on, running, if it is REQUEUED


@dataclass
class Watch:
    """Of one queue. Moments are in seconds, and never fall."""

    head: int | None = None  # that was waited for last
    waited: float = 0.0  # for it, before the waiting that goes on
    since: float | None = None  # when that began; None: nobody waits

    def wait(self, head: int, now: float) -> None:
        """Somebody waits for `head`, until `rest` is called."""
        if self.head != head:
            self.head, self.waited, self.since = head, 0.0, None
        if self.since is None:
            self.since = now

    def rest(self, now: float) -> None:
        """Nobody waits from now on."""
        if self.since is not None:
            self.waited += now - self.since
            self.since = None

    def due(self, head: int, seconds: float) -> float:
        """When `head` will have been waited for so long, if that goes on; inf while nobody does."""
        if self.since is None or self.head != head:
            return math.inf
        return self.since + seconds - self.waited
