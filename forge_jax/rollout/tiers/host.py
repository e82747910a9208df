"""L2: pages in host memory, the least recently used given up first.

Pages flow in under their names and out again; what has to leave comes back to the caller, who
may store it below. Invariant: never more than `capacity` pages. Threads may share it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Sharding

from forge_jax.rollout.tiers.payload import Page

Name = tuple[bytes, bytes]  # root and key of a page
Place = Callable[[Page], Page]


class HostPages:
    """A bounded map from name to page."""

    def __init__(self, capacity: int, place: Place = lambda page: page):
        """`place` moves a page to the memory that it is to be kept in."""
        self._capacity = capacity
        self._place = place
        self._pages: OrderedDict[Name, Page] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: Name) -> bool:
        return name in self._pages

    @property
    def nbytes(self) -> int:
        return self._bytes

    def leading(self, names: Sequence[Name]) -> list[Page]:
        """The pages of the longest run of `names` that is here from the first on."""
        found = []
        with self._lock:
            for name in names:
                page = self._pages.get(name)
                if page is None:
                    break
                found.append(page)
            for name in reversed(names[: len(found)]):  # the first ones are what others share
                self._pages.move_to_end(name)
        return found

    def put(self, name: Name, page: Page) -> list[tuple[Name, Page]]:
        """Keeps a page; returns those that had to leave for it."""
        placed = self._place(page)
        left = []
        with self._lock:
            old = self._pages.pop(name, None)
            self._pages[name] = placed
            self._bytes += placed.nbytes - (0 if old is None else old.nbytes)
            while len(self._pages) > self._capacity:
                gone, page = self._pages.popitem(last=False)
                self._bytes -= page.nbytes
                left.append((gone, page))
        return left

    def clear(self) -> int:
        """Forgets all pages; says how many they were."""
        with self._lock:
            count = len(self._pages)
            self._pages.clear()
            self._bytes = 0
        return count


def pinned(where: Sharding) -> Place:
    """Places pages in pinned host memory beside the devices of `where`, from which they reach
    these without a copy by the CPU; in ordinary memory where the backend has none."""
    devices: list[Any] = list(where.device_set)
    kinds = {memory.kind for device in devices for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return lambda page: page
    there = where.with_memory_kind("pinned_host")
    return lambda page: replace(page, kv=jax.device_put(page.kv, there))
