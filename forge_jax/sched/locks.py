"""Who may change a pool, and who alone may compact it or delete from it.

A store and its folder, if it has one, flow in; a lock is held while a block runs. The
invariant: of all that ask, one has it, and a process that died has none for long: the system
frees the lock of a folder at once, a lease elsewhere ends after LEASE_SECONDS.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorstore as ts

from forge_jax.config import UserError
from forge_jax.sched.answers import StoreRefused, StoreUnavailable, answer

LEASE = "lease"
# A holder that goes on renews before each step that another must not see half done; a step is a
# few answers, each of which comes within answers.ANSWER_SECONDS or ends it.
LEASE_SECONDS = 300.0
# Of a folder that is full, busy or away; whatever else keeps a file from being locked stays.
_PASSING = {
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOLCK,
    errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.ENOMEM,
}  # fmt: skip


class PoolBusy(UserError):
    """Another process compacts or deletes."""


@contextmanager
def locked(folder: Path, name: str, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a name in a folder. BlockingIOError where it is held and `wait` is not."""
    with _opened(folder / "locks", name) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def _opened(locks: Path, name: str) -> Iterator[int]:
    try:
        locks.mkdir(parents=True, exist_ok=True)
        handle = os.open(locks / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        fault = StoreUnavailable if error.errno in _PASSING else StoreRefused
        raise fault(f"{locks / name} cannot be locked: {error}") from error
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def keeping(store: ts.KvStore, folder: Path | None) -> Iterator[Callable[[], None]]:
    """Holds what one process at a time may: compact and delete. Raises PoolBusy where another
    does. What it yields is to be called before each step, and raises PoolBusy where a lease was
    lost meanwhile."""
    if folder is None:
        lease = _Lease(store)
        lease.take()
        try:
            yield lease.renew
        finally:
            lease.give_back()
        return
    try:
        with locked(folder, "keeper", wait=False):
            yield lambda: None  # nobody can take it away
    except BlockingIOError as error:
        raise PoolBusy(f"another process compacts or deletes in {folder}") from error


class _Lease:
    """An object of a store that one process at a time has written.

    What time it is comes with each answer of the store: the clock of the machine that asks. The
    clocks of those that share a pool may differ by less than LEASE_SECONDS.
    """

    def __init__(self, store: ts.KvStore):
        self._store = store
        self._holder = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        self._generation = b""

    def take(self) -> None:
        found = answer(self._store.read(LEASE))
        if found.state == "value":
            held = json.loads(found.value)
            left = held["until"] - found.stamp.time
            if left > 0:
                raise PoolBusy(
                    f"another process compacts or deletes: {held['holder']}, for {left:.0f} s more "
                    "unless it ends or goes on"
                )
        self._write(found.stamp.generation, found.stamp.time)

    def renew(self) -> None:
        found = answer(self._store.read(LEASE))
        self._write(self._generation, found.stamp.time)

    def give_back(self) -> None:
        answer(self._store.write(LEASE, None, if_equal=self._generation))

    def _write(self, before: bytes, now: float) -> None:
        """Puts this holder in the place of generation `before`, or raises PoolBusy."""
        record = json.dumps({"holder": self._holder, "until": now + LEASE_SECONDS}).encode()
        wrote = answer(self._store.write(LEASE, record, if_equal=before))
        self._generation = wrote.generation
        if not wrote.generation:
            found = answer(self._store.read(LEASE))
            if found.state != "value" or found.value != record:  # else the answer had been lost
                raise PoolBusy("another process has begun to compact or delete")
            self._generation = found.stamp.generation
