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
        self.denies = False

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if self.denies:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]
        with self._lock:
            return list(self._app(environ, start_response))


class Service:
    """An S3 service that can be stopped, and started again with what it held."""

    def __init__(self) -> None:
        self._app, self._port = OneByOne(), 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self._app, threaded=True)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def deny(self) -> None:
        """Whoever asks from now on is told that it may not."""
        self._app.denies = True

    def permit(self) -> None:
        self._app.denies = False

    def stop(self) -> None:
        """Whoever asks from now on is refused the connection."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The `s3://` URL of an empty bucket; the environment leads to the service meanwhile."""
    with s3_service() as (_, bucket):
        yield bucket


@contextmanager
def s3_service() -> Iterator[tuple[Service, str]]:
    """`s3_bucket`, and the service that it is of, which is to be running at the end."""
    service = Service()
    settings = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": service.url,
    }
    bucket = next(BUCKETS)
    try:
        with mock.patch.dict(os.environ, settings):
            request = urllib.request.Request(f"{service.url}/{bucket}", method="PUT")
            urllib.request.urlopen(request).close()
            yield service, f"s3://{bucket}"
    finally:
        service.stop()
