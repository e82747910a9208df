"""The places of a mesh: each has slots and pages of its own, and a tree over them.

Jobs flow in, stays at places flow out and back. A place reads its own pages alone, so what was
computed at one is found there only. Invariant: all pages of a stay are of the place of its slot.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.memory import Memory
from forge_jax.rollout.prefix import Node
from forge_jax.rollout.tiers.outlet import Outlet


class Places:
    """Owns the memory of every place; `root` is the key of the present weights."""

    def __init__(self, cfg: RolloutConfig, root: bytes):
        self.root = root
        self.all = tuple(Memory(cfg, root, place) for place in range(cfg.dealt))
        self.running = [0] * cfg.dealt  # stays at every place
        self.outlet: Outlet | None = None  # to tiers below, if there are any
        self._cfg = cfg

    def lead_to(self, outlet: Outlet | None) -> None:
        """Has all places note what is to go down in `outlet`."""
        self.outlet = outlet
        for memory in self.all:
            memory.outlet = outlet

    def renew(self, root: bytes) -> None:
        """Goes on with other weights: nothing that is in a tree now is found any more."""
        self.root = root
        for memory in self.all:
            memory.renew(root)
        self.lead_to(None if self.outlet is None else self.outlet.renewed())

    def order(self, job: Job) -> Sequence[int]:
        """The places with a free slot, that where a job costs least first.

        It costs the tokens that it cannot read there, and a page for each request that runs there
        beyond a bundle more than at the idlest place; of equals the idlest comes first. So requests
        with the same beginning meet at one place, as long as that is worth it.
        """
        if len(self.all) == 1:
            return (0,)
        free = [place for place, n in enumerate(self.running) if n < self._cfg.place_slots]
        allowed = min(self.running) + self._cfg.bundle

        def cost(place: int) -> tuple[int, int]:
            running = self.running[place]
            load = self._cfg.page * max(0, running - allowed)
            return load - self.all[place].saves(job), running

        return sorted(free, key=cost)

    def awaits(self, job: Job, place: int) -> bool:
        """Whether a running prefill computes more of a job's prefix than there is at a place."""
        job.waits_at = place
        return self.all[place].awaits(job)

    def still_waits(self, job: Job) -> bool:
        """Whether a job waits as it was last told by `awaits`, for a place that has a free slot:
        to be asked often."""
        place = job.waits_at
        return self.running[place] < self._cfg.place_slots and self.all[place].comes(job.awaited)

    def best(self, keys: Sequence[bytes]) -> Memory:
        """The memory with the longest beginning of pages `keys`, of equals that with the fewest
        requests, of these the emptiest."""
        if len(self.all) == 1:
            return self.all[0]

        def merit(place: int) -> tuple[int, int, int]:
            memory = self.all[place]
            return len(memory.tree.match(keys)), -self.running[place], memory.pool.free

        return self.all[max(range(len(self.all)), key=merit)]

    def open(self, job: Job, order: Iterable[int], reserve: Callable[[int], int]) -> Stay | None:
        """Pages for all that is known of a job at the first place of `order` that has them, and
        `reserve` more of a place; None if there is none."""
        for place in order:
            stay = self.all[place].open(job, reserve(self.running[place]))
            if stay is not None:
                self.running[place] += 1
                return stay
        return None

    def grow(self, stay: Stay, tokens: int) -> bool:
        """See `Memory.grow`."""
        return self.all[stay.place].grow(stay, tokens)

    def publish(self, stay: Stay, filled: int) -> list[tuple[int, Node]]:
        """See `Memory.publish`."""
        return self.all[stay.place].publish(stay, filled)

    def close(self, stay: Stay) -> None:
        """Takes all pages of a stay back."""
        self.running[stay.place] -= 1
        self.all[stay.place].close(stay)

    def audit(self, stays: Sequence[Stay]) -> None:
        """Raises AssertionError unless every page has one owner, at the owner's place."""
        slots, pages = self._cfg.place_slots, self._cfg.place_pages
        for place, memory in enumerate(self.all):
            here = [stay for stay in stays if stay.place == place]
            memory.audit(here)
            assert len(here) == self.running[place], f"{self.running[place]=} but {len(here)} run"
            assert all(stay.slot // slots == place for stay in here), f"slots beside {place=}"
            tables = np.array([page for stay in here for page in stay.table], np.int32)
            assert (tables // pages == place).all(), f"pages beside {place=}: {tables}"
