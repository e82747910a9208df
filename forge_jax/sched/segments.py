"""Segments: many items of a pool in one object.

Objects of items flow in, by number; they flow out again one by one, as the bytes they were.
The invariant: a segment is written once, whole, under a name that its content gives it.

A segment is `segments/FIRST-LAST-COUNT-DIGEST`: a prefix (magic, format version, items, bytes
of all objects, BLAKE2b digest of these and of the index), the index (number, offset, length of
each item, in order), and the objects, each of which proves itself whole (`codec`).
"""

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorstore as ts

from forge_jax.config import UserError
from forge_jax.sched.answers import answer, names_under, part

SEGMENTS = "segments/"
DAMAGED = "corrupt-segments/"
MAGIC = b"FJSG"
VERSION = 1
_PREFIX = struct.Struct("<4sHQQ16s")
_ROW = struct.Struct("<QQQ")
_NAME = re.compile(r"\d{12}-\d{12}-(\d+)-[0-9a-f]{32}")


Index = Mapping[int, tuple[int, int]]  # of an item its first byte, and the one past its last


class Segments:
    """The segments of one pool. What they hold is remembered; threads may share it."""

    def __init__(self, store: ts.KvStore):
        self._store = store
        self._indexes: dict[str, Index] = {}  # replaced, never changed

    def refresh(self) -> None:
        """Learns of segments that have come and gone; one whose index is damaged is moved to
        `corrupt-segments/`."""
        names = [SEGMENTS + name for name in names_under(self._store, SEGMENTS)]
        known = self._indexes
        found = {name: known[name] for name in names if name in known}
        for name in names:
            if name in found:
                continue
            head = part(self._store, name, 0, _head_bytes(name))
            if head is None:
                continue  # gone since
            index = read_index(head)
            if index is None:
                self._put_aside(name)
            else:
                found[name] = index
        self._indexes = found

    def items(self) -> set[int]:
        """Numbers of all items in the segments known."""
        return {item for index in self._indexes.values() for item in index}

    def holding(self, item: int) -> str | None:
        """The segment known to hold the item."""
        return next((name for name, index in self._indexes.items() if item in index), None)

    def read(self, item: int) -> bytes | None:
        """The object of an item, or None where no segment holds it.

        A damaged one comes out as it is, perhaps short.
        """
        for fresh in (False, True):
            if fresh:
                self.refresh()
            name = self.holding(item)
            if name is None:
                continue
            start, end = self._indexes[name][item]
            found = part(self._store, name, start, end)
            if found is not None:
                return found
        return None

    def write(self, objects: Mapping[int, bytes]) -> str:
        """Stores a segment and reads it back: on return it is there, whole. Its name."""
        name, data = encode_segment(objects)
        answer(self._store.write(name, data))
        if answer(self._store.read(name)).value != data:
            raise RuntimeError(f"{name} is not read back as it was written")
        self.refresh()
        return name

    def without(self, items: set[int], held: Callable[[], None]) -> None:
        """Removes items: a segment that holds some is written anew, and then deleted. `held` is
        called before either, and raises where another may do so too."""
        self.refresh()
        for name, index in self._indexes.items():
            if items.isdisjoint(index):
                continue
            whole = answer(self._store.read(name)).value
            left = {i: whole[start:end] for i, (start, end) in index.items() if i not in items}
            held()
            if left:
                self.write(left)
            answer(self._store.write(name, None))
        self.refresh()

    def _put_aside(self, name: str) -> None:
        whole = answer(self._store.read(name))
        if whole.state == "value":
            answer(self._store.write(DAMAGED + name.removeprefix(SEGMENTS), whole.value))
            answer(self._store.write(name, None))


def encode_segment(objects: Mapping[int, bytes]) -> tuple[str, bytes]:
    """The name and the bytes of a segment; equal objects give equal ones."""
    numbers = sorted(objects)
    offset, rows = _PREFIX.size + _ROW.size * len(numbers), []
    for number in numbers:
        rows.append(_ROW.pack(number, offset, len(objects[number])))
        offset += len(objects[number])
    index, body = b"".join(rows), b"".join(objects[number] for number in numbers)
    fields = (MAGIC, VERSION, len(numbers), len(body))
    content = hashlib.blake2b(index + body, digest_size=16).hexdigest()
    name = f"{SEGMENTS}{numbers[0]:012d}-{numbers[-1]:012d}-{len(numbers)}-{content}"
    return name, _PREFIX.pack(*fields, _digest(fields, index)) + index + body


def read_index(head: bytes) -> Index | None:
    """Where each item of a segment lies, or None unless `head` is its prefix and index."""
    if len(head) < _PREFIX.size:
        return None
    *fields, digest = _PREFIX.unpack_from(head)
    index = head[_PREFIX.size :]
    known = fields[:2] == [MAGIC, VERSION]
    if not known or len(index) != _ROW.size * fields[2] or digest != _digest(fields, index):
        return None
    return {n: (start, start + size) for n, start, size in _ROW.iter_unpack(index)}


def _head_bytes(name: str) -> int:
    """Bytes of a segment's prefix and index, by its name."""
    match = _NAME.fullmatch(name.removeprefix(SEGMENTS))
    if match is None:
        raise UserError(f"pool: {name!r} is not the name of a segment")
    return _PREFIX.size + _ROW.size * int(match[1])


def _digest(fields: Sequence[Any], index: bytes) -> bytes:
    whole = hashlib.blake2b(_PREFIX.pack(*fields, b""), digest_size=16)
    whole.update(index)
    return whole.digest()
