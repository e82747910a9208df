"""L3: pages as objects of a key-value store that several engines share.

Pages flow in under (root, key) and out again. Invariant: a page comes out as it was put in, or
not at all: what is truncated, altered, late or unreachable is a miss and is counted. Calls
block; threads may share a store.

A root is a digest of all that pages depend on but their tokens: the weights above all. Objects
of a root lie under a prefix of its own, so that they can be dropped together.
"""

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import tensorstore as ts

from forge_jax.rollout.tiers.cost import FetchCost
from forge_jax.rollout.tiers.payload import CorruptPage, Page, PageFormat, decode, encode

logger = logging.getLogger(__name__)

FIRST_BATCH = 4  # pages asked for before it is known that there are any
LAST_BATCH = 128
FAULTS = (
    "read_failures",
    "read_timeouts",
    "write_failures",
    "drop_failures",
    "writes_skipped",
)
REMEMBERED = 1 << 16  # keys that are known to be stored, or to be avoided


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a store may take, and how often it may fail."""

    base: float = 1.0  # seconds for any fetch
    per_ki: float = 0.25  # more for every 1024 tokens
    write: float = 30.0  # for a page to be stored
    failures: int = 3  # in a row, after which the store is left alone
    rest: float = 30.0  # seconds that it is left alone for, and a tombstone stands

    def fetch(self, tokens: int) -> float:
        """Seconds that a fetch of so many tokens may take."""
        return self.base + self.per_ki * tokens / 1024


class PageStore:
    """Reads and writes pages; see the module."""

    def __init__(
        self, store: ts.KvStore, format: PageFormat, cost: FetchCost, patience: Patience
    ) -> None:
        self.cost = cost
        self.counts: Counter[str] = Counter()
        self._store = store
        self._format = format
        self._patience = patience
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, None] = OrderedDict()  # objects that are there
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # object -> until when
        self._failures = 0  # in a row
        self._closed_until = 0.0

    def totals(self) -> dict[str, float]:
        """Running totals, and how many keys are avoided now."""
        names = ("hits", "misses", "corrupt", "pages_written", "bytes_read", "bytes_written")
        found: dict[str, float] = {name: self.counts[name] for name in (*names, *FAULTS)}
        now = time.monotonic()
        with self._lock:
            found["tombstones"] = sum(until > now for until in self._tombstones.values())
        return found

    def has(self, root: bytes, key: bytes) -> bool:
        """This engine has seen the page there."""
        return object_name(root, key) in self._stored

    def read(self, root: bytes, keys: Sequence[bytes], until: float) -> list[Page]:
        """The pages of the longest run of `keys` that is there from the first on, as far as it
        comes before `until` (`time.monotonic`)."""
        pages: list[Page] = []
        size = FIRST_BATCH
        while len(pages) < len(keys) and self._open() and time.monotonic() < until:
            batch = keys[len(pages) : len(pages) + size]
            found = self._read_batch(root, batch, until)
            pages += found
            if len(found) < len(batch):
                break
            size = min(2 * size, LAST_BATCH)
        self._count("hits", len(pages))
        self._count("misses", len(keys) - len(pages))
        return pages

    def write(self, root: bytes, key: bytes, page: Page) -> bool:
        """Stores a page, unless it is known to be there; False where that fails."""
        name = object_name(root, key)
        if self.has(root, key):
            return True
        if not self._open():
            self._count("writes_skipped")
            return False
        data = encode(key, page)
        future = self._store.write(name, data)
        try:
            future.result(timeout=self._patience.write)
        except Exception as error:  # whatever a driver raises: the page is not stored
            future.cancel()
            self._failed("write_failures", name, error)
            return False
        with self._lock:
            self._failures = 0
            self._tombstones.pop(name, None)
            self._remember(name)
            self.counts["pages_written"] += 1
            self.counts["bytes_written"] += len(data)
        return True

    def drop(self, root: bytes) -> None:
        """Removes every page of a root."""
        with self._lock:
            for name in [name for name in self._stored if name.startswith(prefix_of(root))]:
                del self._stored[name]
        prefix = prefix_of(root)
        everything = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        try:
            self._store.delete_range(everything).result(timeout=self._patience.write)
        except Exception as error:  # whatever a driver raises: the pages stay, unread
            self._failed("drop_failures", None, error)
        else:
            self._count("roots_dropped")

    def _read_batch(self, root: bytes, keys: Sequence[bytes], until: float) -> list[Page]:
        pages: list[Page] = []
        began = time.monotonic()
        first = began
        names = [object_name(root, key) for key in keys]
        names = list(itertools.takewhile(lambda name: not self._avoided(name), names))
        futures = [self._store.read(name) for name in names]
        for name, key, future in zip(names, keys, futures, strict=False):
            page = self._page(name, key, future, until)
            if page is None:
                break
            first = first if pages else time.monotonic()
            pages.append(page)
        for future in futures[len(pages) :]:
            future.cancel()
        if pages:
            tokens = (len(pages) - 1) * self._format.tokens
            self.cost.observe(first - began, time.monotonic() - first, tokens)
        return pages

    def _page(self, name: str, key: bytes, future: ts.Future, until: float) -> Page | None:
        try:
            found = future.result(timeout=max(until - time.monotonic(), 1e-3))
        except TimeoutError as error:
            self._failed("read_timeouts", None, error)
            return None
        except Exception as error:  # whatever a driver raises: the page is computed instead
            self._failed("read_failures", name, error)
            return None
        with self._lock:
            self._failures = 0
            if found.state != "value":
                self._stored.pop(name, None)  # another has dropped it
                return None
        try:
            page = decode(found.value, key, self._format)
        except CorruptPage:
            self._corrupt(name, found)
            return None
        with self._lock:
            self._remember(name)
            self.counts["bytes_read"] += len(found.value)
        return page

    def _corrupt(self, name: str, found: ts.KvStore.ReadResult) -> None:
        """Buries a damaged object, and removes it unless another has replaced it since."""
        self._bury(name)
        self._count("corrupt")
        future = self._store.write(name, None, if_equal=found.stamp.generation)
        future.force()  # whether it can be removed or not, it is not read again

    def _failed(self, what: str, name: str | None, error: Exception) -> None:
        logger.warning("%s: %r", what, error)
        if name is not None:
            self._bury(name)
        with self._lock:
            self.counts[what] += 1
            self._failures += 1
            if self._failures >= self._patience.failures:
                self._closed_until = time.monotonic() + self._patience.rest

    def _open(self) -> bool:
        return time.monotonic() >= self._closed_until

    def _avoided(self, name: str) -> bool:
        return self._tombstones.get(name, 0.0) > time.monotonic()

    def _bury(self, name: str) -> None:
        with self._lock:
            self._stored.pop(name, None)
            self._tombstones[name] = time.monotonic() + self._patience.rest
            if len(self._tombstones) > REMEMBERED:
                self._tombstones.popitem(last=False)

    def _remember(self, name: str) -> None:
        self._stored[name] = None
        self._stored.move_to_end(name)
        if len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by


def prefix_of(root: bytes) -> str:
    """Under which the objects of a root lie."""
    return f"{root.hex()}/"


def object_name(root: bytes, key: bytes) -> str:
    return prefix_of(root) + key.hex()
