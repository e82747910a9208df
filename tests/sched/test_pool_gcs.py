"""The data pool on object storage: tensorstore's own gs driver against a local server."""

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from random_episodes import random_group, same

from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.pool import Pool

Objects = dict[str, bytes]


def handler(objects: Objects) -> type[BaseHTTPRequestHandler]:
    """The few calls of Google Cloud Storage's JSON API that a key-value store makes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def reply(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("x-goog-generation", "1")
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            name, data = query["name"], self.rfile.read(int(self.headers["Content-Length"]))
            if query.get("ifGenerationMatch") == "0" and name in objects:
                return self.reply(412)
            objects[name] = data
            return self.reply(200, json.dumps({"name": name, "generation": "1"}).encode())

        def do_DELETE(self) -> None:
            self.reply(204 if objects.pop(self.name(), None) is not None else 404)

        def do_GET(self) -> None:
            if self.name():
                found = objects.get(self.name())
                return self.reply(404) if found is None else self.reply(200, found)
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            names = [n for n in objects if query["startOffset"] <= n < query["endOffset"]]
            items = [{"name": name, "size": str(len(objects[name]))} for name in names]
            return self.reply(200, json.dumps({"items": items}).encode())

        def name(self) -> str:
            match = re.search(r"/o/(.+)$", urllib.parse.urlsplit(self.path).path)
            return urllib.parse.unquote(match[1]) if match else ""

    return Handler


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    stored: Objects = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stored))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    yield stored
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_bucket_holds_a_pool(objects: Objects) -> None:
    pool = Pool.open("gs://a-bucket/runs/first")
    for number in (11, 2, 30, 2):
        pool.put(number, random_group(number))
    assert sorted(objects) == [f"runs/first/items/{n:012d}" for n in (2, 11, 30)]
    assert pool.items() == (2, 11, 30)
    assert all(same(pool.get(n), random_group(n)) for n in pool.items())
    pool.delete([30])
    assert Pool.open("gs://a-bucket/runs/first/").items() == (2, 11)

    key = "runs/first/items/000000000002"
    objects[key] = objects[key][:-1]
    with pytest.raises(CorruptObject, match="items/000000000002"):
        pool.get(2)
    assert (pool.items(), pool.corrupt()) == ((11,), (2,))
