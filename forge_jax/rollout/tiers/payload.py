"""One page outside the device: its keys and values of all layers, and its bytes in a store.

A page of host arrays flows in, one object of bytes flows out, and back. Invariant: `decode`
gives the page that `encode` was given, bit by bit, or raises.

An object is `MAGIC`, its length (u64), a digest of all that follows, the length of a JSON
header (u32), the header, the keys and values, then tails and routes where there are any;
little-endian.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.rollout.moving import MOVED, Pages

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
    tails: np.ndarray | None = None  # [modules, E], see `modules.Drafting`; None: no modules

    @property
    def nbytes(self) -> int:
        others = [x.nbytes for x in (self.routes, self.tails) if x is not None]
        return int(self.kv.nbytes) + sum(others)


@dataclass(frozen=True)
class PageFormat:
    """What every page of one engine looks like."""

    shape: tuple[int, ...]  # of `Page.kv`
    dtype: str
    tails: tuple[int, ...] | None = None  # shape of `Page.tails`, of the same dtype
    routes: tuple[int, ...] | None = None  # shape of `Page.routes`
    routes_dtype: str | None = None

    @property
    def tokens(self) -> int:
        return self.shape[3]


def encode(key: bytes, page: Page) -> bytes:
    """The object of a page under its key."""
    header = _header(key, format_of(page))
    arrays = [np.asarray(page.kv), *(x for x in (page.tails, page.routes) if x is not None)]
    parts = (struct.pack("<I", len(header)), header, *(array.tobytes() for array in arrays))
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
    dtype = jnp.dtype(wanted.dtype)
    kv = np.frombuffer(data, dtype, math.prod(wanted.shape), body).reshape(wanted.shape)
    tails = routes = None
    end = body + kv.nbytes
    if wanted.tails is not None:
        tails = np.frombuffer(data, dtype, math.prod(wanted.tails), end).reshape(wanted.tails)
        end += tails.nbytes
    if wanted.routes is not None:
        routes = np.frombuffer(data, wanted.routes_dtype, offset=end).reshape(wanted.routes)
    return Page(kv, routes, tails)


def format_of(page: Page) -> PageFormat:
    """What a page looks like."""
    return PageFormat(
        shape=page.kv.shape,
        dtype=page.kv.dtype.name,
        tails=None if page.tails is None else page.tails.shape,
        routes=None if page.routes is None else page.routes.shape,
        routes_dtype=None if page.routes is None else page.routes.dtype.name,
    )


def pages_of(moved: Pages, routes: Sequence[np.ndarray | None]) -> list[Page]:
    """The first of the pages that came off a device, one for each of `routes`."""
    host = jax.device_get(moved)
    # Copies, or one page that is kept would keep all that came with it.
    return [
        Page(
            host.kv[index].copy(),
            known,
            None if host.tails is None else host.tails[index].copy(),
        )
        for index, known in enumerate(routes)
    ]


def parts_of(pages: Sequence[Page]) -> tuple[Pages, ...]:
    """Pages as a device takes them in, `MOVED` in each part, the last filled up with zeros."""

    def part(some: Sequence[Page]) -> Pages:
        tails = [page.tails for page in some if page.tails is not None]
        return Pages(
            kv=_filled([page.kv for page in some]), tails=_filled(tails) if tails else None
        )

    return tuple(part(pages[start : start + MOVED]) for start in range(0, len(pages), MOVED))


def _filled(arrays: Sequence[Any]) -> Any:
    some = [np.asarray(array) for array in arrays]
    return np.stack([*some, *[np.zeros_like(some[0])] * (MOVED - len(some))])


def _header(key: bytes, format: PageFormat) -> bytes:
    return json.dumps({"key": key.hex(), **asdict(format)}, sort_keys=True).encode()


def _digest(covered: bytes | memoryview) -> bytes:
    return hashlib.blake2b(covered, digest_size=_DIGEST).digest()
