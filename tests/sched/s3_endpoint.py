"""An S3 service over HTTP in a thread of this process, for it and the processes it starts."""

import itertools
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKETS = map("pool-{}".format, itertools.count())  # moto has one set of them in a process


class OneByOne:
    """moto, a request at a time: among several at once it checks the condition of a write and
    writes in two steps, so that two may both find no object. S3 does it in one."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._lock:
            return list(self._app(environ, start_response))


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The `s3://` URL of an empty bucket; the environment leads to the service meanwhile."""
    server = make_server("127.0.0.1", 0, OneByOne(), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    settings = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": url,
    }
    bucket = next(BUCKETS)
    try:
        with mock.patch.dict(os.environ, settings):
            request = urllib.request.Request(f"{url}/{bucket}", method="PUT")
            urllib.request.urlopen(request).close()
            yield f"s3://{bucket}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
