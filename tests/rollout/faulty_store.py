"""Key-value stores that fail on purpose, and pages to put into them."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorstore as ts

from forge_jax.rollout.tiers.cost import FetchCost
from forge_jax.rollout.tiers.payload import Page, PageFormat
from forge_jax.rollout.tiers.store import PageStore, Patience

FORMAT = PageFormat(shape=(3, 2, 2, 4, 8), dtype="float32", routes=(4, 3, 2), routes_dtype="int8")
PATIENCE = Patience(base=5.0, per_ki=0.0, write=5.0, failures=3, rest=60.0)


@dataclass
class Faulty:
    """A store in memory whose faults a test switches on; what is not said goes through."""

    inner: Any = field(default_factory=lambda: ts.KvStore.open("memory://").result())
    read_error: Exception | None = None
    write_error: Exception | None = None
    silent: bool = False  # neither reads nor writes ever end
    delay: float = 0.0  # seconds until what is read is there
    gate: threading.Event | None = None  # set once it may be
    cut: int = 0  # bytes that are missing at the end of what is read
    flip: int | None = None  # place of a byte that is read wrongly
    reads: int = 0
    writes: int = 0
    promises: list[Any] = field(default_factory=list)

    def read(self, key: str) -> Any:
        self.reads += 1
        if self.read_error is not None:
            return Failed(self.read_error)
        if self.silent:
            return self._never()
        found = self.inner.read(key).result()
        if found.state == "value" and (self.cut or self.flip is not None):
            damaged = bytearray(found.value)
            if self.flip is not None:
                damaged[self.flip % len(damaged)] ^= 0x10
            value = bytes(damaged[: len(damaged) - self.cut])
            found = Read("value", value, found.stamp)
        if self.gate is not None:
            return Gated(found, self.gate)
        return Late(found, self.delay) if self.delay else Done(found)

    def write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> Any:
        self.writes += 1
        if self.write_error is not None:
            return Failed(self.write_error)
        if self.silent:
            return self._never()
        return self.inner.write(key, value, if_equal=if_equal)

    def _never(self) -> Any:
        promise, future = ts.Promise.new()
        self.promises.append(promise)  # a promise that is gone is broken
        return future

    def delete_range(self, keys: Any) -> Any:
        return self.inner.delete_range(keys)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.inner.list().result())


@dataclass
class Read:
    state: str
    value: bytes
    stamp: Any


@dataclass
class Done:
    value: Any

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    def cancel(self) -> bool:
        return False


@dataclass
class Late(Done):
    delay: float

    def result(self, timeout: float | None = None) -> Any:
        time.sleep(self.delay if timeout is None else min(self.delay, timeout))
        if timeout is not None and timeout < self.delay:
            raise TimeoutError
        return self.value


@dataclass
class Gated(Done):
    gate: threading.Event

    def result(self, timeout: float | None = None) -> Any:
        if not self.gate.wait(timeout):
            raise TimeoutError
        return self.value


@dataclass
class Failed:
    error: Exception

    def result(self, timeout: float | None = None) -> Any:
        raise self.error

    def cancel(self) -> bool:
        return False

    def force(self) -> None:
        pass


def page_store(store: Any, patience: Patience = PATIENCE) -> PageStore:
    return PageStore(store, FORMAT, FetchCost(0.0, float("inf")), patience)


def random_page(seed: int, format: PageFormat = FORMAT) -> Page:
    rng = np.random.default_rng(seed)
    kv = rng.normal(size=format.shape).astype(format.dtype)
    return Page(kv, rng.integers(0, 8, format.routes).astype(np.int8) if format.routes else None)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def same(a: Page, b: Page) -> bool:
    return np.array_equal(np.asarray(a.kv), np.asarray(b.kv)) and np.array_equal(a.routes, b.routes)


def until(what: Any, seconds: float = 20.0) -> None:
    """Waits for background work."""
    ready = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if what():
            return
        ready.wait(0.005)
    raise AssertionError("it did not happen")
