"""Where a store of pages is: from what a user writes to an open key-value store."""

import json
import os
import time
from typing import Any

import tensorstore as ts

from forge_jax.config import UserError

OPEN_SECONDS = 20.0  # after which a store that does not answer is not there
# A reader must see all of an object or none of it. File: written under a name that no other
# write uses, synced and renamed (the default writes over what a killed writer left in one lock
# file, tensorstore 0.1.86). S3 and GCS replace objects as a whole by themselves.
# A lost page is computed again, so a failing service is asked again only a little.
_RETRIES = {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"}
_CONTEXT = {
    "file_io_locking": {"mode": "none"},
    "file_io_sync": True,
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}
_PROBE = "probe"


def open_store(location: str) -> tuple[ts.KvStore, float]:
    """Opens a folder's path, a `file://`, `memory://`, `gs://` or `s3://` URL, or a kvstore
    spec of tensorstore as JSON; also says the seconds that reading a small object took.

    An `s3://` URL is of the service that AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL names, where
    one of them is set. UserError, naming the location, where nothing can be stored and read
    back.
    """
    try:
        spec = _spec(location)
        store = ts.KvStore.open(spec, context=ts.Context(_CONTEXT)).result(timeout=OPEN_SECONDS)
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


def _spec(location: str) -> Any:
    if not location:
        raise ValueError("a path or a URL is needed")
    if location.startswith("{"):
        return json.loads(location)
    if "://" not in location:
        return {"driver": "file", "path": os.path.abspath(location) + "/"}
    spec = ts.KvStore.Spec(location if location.endswith("/") else f"{location}/").to_json()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if spec["driver"] == "s3" and endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return spec
