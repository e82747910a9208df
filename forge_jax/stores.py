"""Where a key-value store is: from what a user writes to what tensorstore opens.

Locations flow in, specs and contexts flow out. The invariant: a reader of a store opened so
sees all of an object or none of it, and a store that is away says so soon.
"""

import json
import os
from typing import Any

import tensorstore as ts

# File: written under a name that no other write uses, synced and renamed. The default locks one
# name per key instead and writes over what a killed writer left in it without cutting it: a
# shorter object then ends in the bytes of the older one (tensorstore 0.1.86). S3 and GCS replace
# objects as a whole by themselves. A failing service is asked again only a little: whoever calls
# knows better how long to wait.
_RETRIES = {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"}
CONTEXT = {
    "file_io_locking": {"mode": "none"},
    "file_io_sync": True,
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}


def spec_of(location: str) -> dict[str, Any]:
    """The spec of a folder's path, a URL (`file://`, `memory://`, `gs://`, `s3://`), or a
    kvstore spec of tensorstore as JSON.

    An `s3://` URL is of the service that AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL names, where
    one of them is set. ValueError for what is none of these.
    """
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
        spec["use_conditional_write"] = True  # else only where the endpoint is Amazon's
    return spec
