"""Names of pages by what is in them.

A sequence of tokens flows in, one key a full page flows out. Invariant: two pages have the same
key only if the same weights, in the same dtype and layout, made them of the same tokens behind
the same tokens.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

SIZE = 16  # bytes of a key


def root_key(parts: Mapping[str, str | int]) -> bytes:
    """The key before the first page: of everything but tokens that keys and values depend on,
    such as the model, the version of its weights, their dtype and the size of a page."""
    digest = hashlib.blake2b(digest_size=SIZE)
    for name, value in sorted(parts.items()):
        for text in (name, str(value)):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def next_key(before: bytes, ids: np.ndarray) -> bytes:
    """The key of the page with tokens `ids` behind the page of key `before`."""
    data = np.ascontiguousarray(ids, "<i4").tobytes()
    return hashlib.blake2b(data, key=before, digest_size=SIZE).digest()


def block_keys(root: bytes, ids: np.ndarray, page: int) -> list[bytes]:
    """Keys of the full pages of a sequence, each chained to the one before it."""
    keys, key = [], root
    for start in range(0, len(ids) - page + 1, page):
        key = next_key(key, ids[start : start + page])
        keys.append(key)
    return keys
