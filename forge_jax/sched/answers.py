"""What a store answers, in time or not at all.

Futures of tensorstore flow in, their results flow out. The invariant: what keeps a store from
answering is a `StoreUnavailable`, after which the same may be asked again, or a `StoreRefused`,
where asking again would not help.
"""

from typing import Any

import tensorstore as ts

from forge_jax.config import UserError

ANSWER_SECONDS = 60.0  # after which a store that does not answer is not there
# How tensorstore's errors begin that may pass by themselves; a wrong argument's has no such word.
_PASSING = (
    "ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN",
)  # fmt: skip


class StoreUnavailable(Exception):
    """A store is away, busy or full: it is not known whether what was asked was done."""


class StoreRefused(UserError):
    """A store denies what was asked, lacks the place, or does not know how."""


def answer(future: Any) -> Any:
    """What a future comes to. Raises StoreRefused or StoreUnavailable where it fails, the latter
    also where it takes too long."""
    try:
        return future.result(timeout=ANSWER_SECONDS)
    except (ValueError, OSError, NotImplementedError) as error:  # a TimeoutError is an OSError
        raise fault(error) from error


def fault(error: Exception) -> StoreRefused | StoreUnavailable:
    """What an error of a store's answer means to whoever asked."""
    reason = str(error)
    if isinstance(error, OSError) or reason.startswith(_PASSING):
        return StoreUnavailable(reason or f"no answer in {ANSWER_SECONDS:g} seconds")
    return StoreRefused(f"the store refuses: {reason}")


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
            raise fault(error) from error
        found = answer(store.read(key))
        return found.value[start:end] if found.state == "value" else None
    except OSError as error:
        raise fault(error) from error
    return found.value if found.state == "value" else None
