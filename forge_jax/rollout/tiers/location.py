"""Where a store of pages is: from what a user writes to an open key-value store."""

import os
import time

import tensorstore as ts

from forge_jax.config import UserError
from forge_jax.stores import CONTEXT, spec_of

OPEN_SECONDS = 20.0  # after which a store that does not answer is not there
_PROBE = "probe"


def open_store(location: str) -> tuple[ts.KvStore, float]:
    """Opens a folder's path, a `file://`, `memory://`, `gs://` or `s3://` URL, or a kvstore
    spec of tensorstore as JSON; also says the seconds that reading a small object took.

    An `s3://` URL is of the service that AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL names, where
    one of them is set. UserError, naming the location, where nothing can be stored and read
    back.
    """
    try:
        spec = spec_of(location)
        store = ts.KvStore.open(spec, context=ts.Context(CONTEXT)).result(timeout=OPEN_SECONDS)
        key = f"{_PROBE}/{os.getpid()}-{time.monotonic_ns()}"
        store.write(key, key).result(timeout=OPEN_SECONDS)
        began = time.monotonic()
        found = store.read(key).result(timeout=OPEN_SECONDS)
        seconds = time.monotonic() - began
        store.write(key, None).result(timeout=OPEN_SECONDS)
    except (ValueError, NotImplementedError, OSError, TimeoutError) as error:
        reason = str(error) or f"no answer in {OPEN_SECONDS:g} seconds"
        raise UserError(f"store={location!r} cannot be opened: {reason}") from error
    if found.value != key.encode():
        raise UserError(f"store={location!r} does not give back what was written to it")
    return store, seconds
