"""One page outside the device: its keys and values of all layers, and its bytes in a store.

A page of host arrays flows in, one object of bytes flows out, and back. Invariant: `decode`
gives the page that `encode` was given, bit by bit, or raises.

An object is `MAGIC`, its length (u64), a digest of all that follows, the length of a JSON
header (u32), the header, the keys and values, and the routes if there are any; little-endian.
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

MAGIC = b"forgeKV1"
_DIGEST = 16  # bytes
_PREFIX = struct.Struct(f"<8sQ{_DIGEST}sI")
_COVERED = _PREFIX.size - 4  # where the bytes under the digest begin


class CorruptPage(Exception):
    """The bytes are not those of the page that was asked for."""


@dataclass(frozen=True, eq=False)
class Page:
    """What is known of the tokens of one full page, as heads are before they are cut."""

    kv: Any  # [layers, 2, K, page, D], keys then values; modules that draft are further layers
    routes: np.ndarray | None = None  # int[page, layers, k]: experts used; None: not recorded

    @property
    def nbytes(self) -> int:
        return int(self.kv.nbytes) + (0 if self.routes is None else self.routes.nbytes)


@dataclass(frozen=True)
class PageFormat:
    """What every page of one engine looks like."""

    shape: tuple[int, ...]  # of `Page.kv`
    dtype: str
    routes: tuple[int, ...] | None = None  # shape of `Page.routes`
    routes_dtype: str | None = None

    @property
    def tokens(self) -> int:
        return self.shape[3]


def encode(key: bytes, page: Page) -> bytes:
    """The object of a page under its key."""
    header = _header(key, format_of(page))
    routes = b"" if page.routes is None else page.routes.tobytes()
    parts = (struct.pack("<I", len(header)), header, np.asarray(page.kv).tobytes(), routes)
    covered = b"".join(parts)
    length = _COVERED + len(covered)
    return struct.pack("<8sQ", MAGIC, length) + _digest(covered) + covered


def decode(data: bytes, key: bytes, wanted: PageFormat) -> Page:
    """The page that `encode` put under `key`.

    Raises CorruptPage if a byte is missing, too many or another, or if the object is intact
    but of another key or format.
    """
    if len(data) < _PREFIX.size:
        raise CorruptPage(f"{len(data)} bytes are no page")
    magic, length, digest, header_size = _PREFIX.unpack_from(data)
    if magic != MAGIC or length != len(data):
        raise CorruptPage(f"{magic=} and {length=} of {len(data)} bytes")
    view = memoryview(data)
    if _digest(view[_COVERED:]) != digest:
        raise CorruptPage("the digest does not fit")
    body = _PREFIX.size + header_size
    if bytes(view[_PREFIX.size : body]) != _header(key, wanted):
        raise CorruptPage(f"an intact object of another key or format than {key.hex()}, {wanted}")
    kv = np.frombuffer(data, jnp.dtype(wanted.dtype), int(np.prod(wanted.shape)), body)
    routes = None
    if wanted.routes is not None:
        routes = np.frombuffer(data, wanted.routes_dtype, offset=body + kv.nbytes)
        routes = routes.reshape(wanted.routes)
    return Page(kv.reshape(wanted.shape), routes)


def format_of(page: Page) -> PageFormat:
    """What a page looks like."""
    if page.routes is None:
        return PageFormat(shape=page.kv.shape, dtype=page.kv.dtype.name)
    return PageFormat(
        shape=page.kv.shape,
        dtype=page.kv.dtype.name,
        routes=page.routes.shape,
        routes_dtype=page.routes.dtype.name,
    )


def _header(key: bytes, format: PageFormat) -> bytes:
    return json.dumps({"key": key.hex(), **asdict(format)}, sort_keys=True).encode()


def _digest(covered: bytes | memoryview) -> bytes:
    return hashlib.blake2b(covered, digest_size=_DIGEST).digest()
