"""The tiers below the device: which page goes down to where, and what comes up again.

Staged copies of pages that are hot, or have to leave the device, flow in; pages flow out to
whoever asks by key. A page goes down when it has been hit a second time, or when the tier above
gives it up. Invariant: nothing here reads the pool of the engine, and no fault of a store is
seen but as a page that is not there.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.rollout.moving import Pages
from forge_jax.rollout.tiers.host import HostPages, Name
from forge_jax.rollout.tiers.payload import Page, pages_of
from forge_jax.rollout.tiers.store import PageStore, Patience

logger = logging.getLogger(__name__)

THREADS = 8  # that wait for the store: as many fetches, and as many writes, at once
PENDING = 512  # pages on their way down, beyond which others are let go


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """Pages copied out of the pool, by a call of the device that may not have ended."""

    root: bytes
    keys: tuple[bytes, ...]
    pages: Pages  # as many as keys, or more
    routes: tuple[np.ndarray | None, ...]
    hot: tuple[bool, ...]  # hit a second time, else given up


class Tiers:
    """L2 and L3, either of which may be missing."""

    def __init__(self, host: HostPages | None, store: PageStore | None, patience: Patience):
        self._host = host
        self._store = store
        self._patience = patience
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._pending = 0
        self._roots: list[bytes] = []  # of this engine's weights, the newest last
        # Reads have threads of their own: a request waits for them.
        self._readers = ThreadPoolExecutor(THREADS, "tier-read")
        self._writers = ThreadPoolExecutor(THREADS, "tier-write")

    def lacks(self, name: Name, hot: bool) -> bool:
        """Whether a page is to be kept that is not known to be below: a hot one in the store."""
        if self._store is not None and self._store.has(*name):
            return False
        held = self._host is not None and name in self._host
        return not held or (hot and self._store is not None)

    def stored(self, root: bytes, keys: Sequence[bytes]) -> int:
        """How many of `keys` from the first on this engine has seen in the store."""
        store = self._store
        if store is None:
            return 0
        return next((i for i, key in enumerate(keys) if not store.has(root, key)), len(keys))

    def at_hand(self, root: bytes, keys: Sequence[bytes]) -> list[Page]:
        """The pages in host memory of the longest run of `keys` from the first on."""
        names = [(root, key) for key in keys]
        pages = [] if self._host is None else self._host.leading(names)
        self._count("host_hits", len(pages))
        return pages

    def pays(self, tokens: int) -> bool:
        """Looking for so many tokens in the store may be faster than computing them."""
        return self._store is not None and self._store.cost.pays(tokens)

    def fetch(self, root: bytes, keys: Sequence[bytes], page: int) -> Future[list[Page]]:
        """The pages in the store of the longest run of `keys`, of `page` tokens each, as far as
        they come in time; they are in host memory too from then on."""
        until = time.monotonic() + self._patience.fetch(len(keys) * page)
        return self._readers.submit(self._fetch, root, keys, until)

    def keep(self, staged: Staged) -> None:
        """Takes pages down, in the background."""
        if self._pending + len(staged.keys) > PENDING:
            self._count("pages_dropped", len(staged.keys))
            return
        self._later(len(staged.keys), self._keep, staged)

    def renew(self, root: bytes) -> None:
        """The weights have changed: pages of older ones leave the host at once, and the store
        when they are of the last but one, so that engines a step behind still find theirs."""
        if self._host is not None:
            self._count("invalidated", self._host.clear())
        if root in self._roots:
            self._roots.remove(root)
        self._roots.append(root)
        while len(self._roots) > 2:
            gone = self._roots.pop(0)
            if self._store is not None:
                self._later(1, self._store.drop, gone)

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals."""
        found: dict[str, float] = {
            name: self._counts[name] for name in ("pages_dropped", "faults", "invalidated")
        }
        found["pages_pending"] = self._pending
        if self._host is not None:
            found["host_hits"] = self._counts["host_hits"]
            found |= {"host_pages": len(self._host), "host_bytes": self._host.nbytes}
        if self._store is not None:
            found |= {f"store_{name}": count for name, count in self._store.totals().items()}
        return {f"tier_{name}": count for name, count in found.items()}

    def _fetch(self, root: bytes, keys: Sequence[bytes], until: float) -> list[Page]:
        assert self._store is not None, "fetch() without a store"
        pages = self._store.read(root, keys, until)
        if self._host is not None:
            for key, page in zip(keys, pages, strict=False):
                self._write(self._host.put((root, key), page))
        return pages

    def _keep(self, staged: Staged) -> None:
        pages = pages_of(staged.pages, staged.routes)
        for index, (key, page) in enumerate(zip(staged.keys, pages, strict=True)):
            name = staged.root, key
            if staged.hot[index] or self._host is None:
                self._write([(name, page)])
            if self._host is not None:
                self._write(self._host.put(name, page))

    def _write(self, leaving: Sequence[tuple[Name, Page]]) -> None:
        if self._store is not None:
            for (root, key), page in leaving:
                self._later(1, self._store.write, root, key, page)

    def _later(self, pages: int, work: Callable[..., Any], *args: Any) -> None:
        """Works in the background, with so many pages in its hands."""

        def ended(future: Future[Any]) -> None:
            with self._lock:
                self._pending -= pages
            error = future.exception()
            if error is not None:
                logger.error("pages could not be kept", exc_info=error)
                self._count("faults", 1)

        with self._lock:
            self._pending += pages
        self._writers.submit(work, *args).add_done_callback(ended)

    def _count(self, what: str, by: int) -> None:
        with self._lock:
            self._counts[what] += by
