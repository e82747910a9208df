"""What a store answers, in time or not at all.

Futures of tensorstore flow in, their results flow out. The invariant: whatever keeps a store
from answering is a `StoreUnavailable`, after which the same may be asked again.
"""

from typing import Any

import tensorstore as ts

ANSWER_SECONDS = 60.0  # after which a store that does not answer is not there


class StoreUnavailable(Exception):
    """A store is away, full, or refuses: it is not known whether what was asked was done."""


def answer(future: Any) -> Any:
    """What a future comes to. Raises StoreUnavailable where it fails or takes too long."""
    try:
        return future.result(timeout=ANSWER_SECONDS)
    except (ValueError, OSError, NotImplementedError) as error:  # a TimeoutError is an OSError
        reason = str(error) or f"no answer in {ANSWER_SECONDS:g} seconds"
        raise StoreUnavailable(reason) from error


def names_under(store: ts.KvStore, prefix: str) -> list[str]:
    """Keys that begin with `prefix`, without it."""
    past = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    keys = answer(store.list(ts.KvStore.KeyRange(prefix, past), len(prefix)))
    return [key.decode() for key in keys]


def part(store: ts.KvStore, key: str, start: int, end: int) -> bytes | None:
    """Bytes [start, end) of an object, fewer where it is shorter; None where there is none."""
    try:
        found = store.read(key, byte_range=slice(start, end)).result(timeout=ANSWER_SECONDS)
    except ValueError as error:
        if not str(error).startswith("OUT_OF_RANGE"):
            raise StoreUnavailable(str(error)) from error
        found = answer(store.read(key))
        return found.value[start:end] if found.state == "value" else None
    except OSError as error:
        raise StoreUnavailable(str(error) or "no answer") from error
    return found.value if found.state == "value" else None
