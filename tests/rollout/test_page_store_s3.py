"""Pages on S3: tensorstore's own driver against a server that speaks the protocol over HTTP."""

import time
import urllib.request
from collections.abc import Iterator

import pytest
from faulty_store import FORMAT, PATIENCE, key, random_page, same
from moto.server import ThreadedMotoServer

from forge_jax.config import UserError
from forge_jax.rollout.tiers.cost import FetchCost
from forge_jax.rollout.tiers.location import open_store
from forge_jax.rollout.tiers.store import PageStore, object_name

ROOT, OTHER = b"r" * 32, b"s" * 32
BUCKET = "pages-of-engines"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    yield url
    server.stop()


def opened(prefix: str = "runs/first") -> PageStore:
    store, seconds = open_store(f"s3://{BUCKET}/{prefix}")
    return PageStore(store, FORMAT, FetchCost(seconds, float("inf")), PATIENCE)


def soon() -> float:
    return time.monotonic() + 20.0


def test_a_bucket_is_shared_by_engines(endpoint: str) -> None:
    one, two = opened(), opened()
    keys = [key(number) for number in range(9)]
    for number in (0, 1, 2, 3, 4, 6):
        assert one.write(ROOT, keys[number], random_page(number))
    pages = two.read(ROOT, keys, soon())
    assert [same(page, random_page(n)) for n, page in enumerate(pages)] == [True] * 5
    assert opened("runs/second").read(ROOT, keys, soon()) == []
    assert two.read(OTHER, keys, soon()) == []

    raw, name = open_store(f"s3://{BUCKET}/runs/first")[0], object_name(ROOT, keys[1])
    data = raw[name]
    for damaged in (data[:-1], data[:8], data[:-1] + b"!"):
        raw[name] = damaged
        fresh = opened()
        assert len(fresh.read(ROOT, keys, soon())) == 1
        assert fresh.totals()["corrupt"] == 1
    assert fresh.write(ROOT, keys[1], random_page(1))
    assert len(opened().read(ROOT, keys, soon())) == 5

    one.drop(ROOT)
    assert opened().read(ROOT, keys, soon()) == []


def test_a_bucket_that_is_not_there_is_named(endpoint: str) -> None:
    with pytest.raises(UserError, match="s3://no-such-bucket/x"):
        open_store("s3://no-such-bucket/x")
