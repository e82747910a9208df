"""Episodes as bytes and back, exactly: every field, every dtype, every bit.

Flows in: the episodes of one item. Flows out: one object that proves itself whole. The
invariant: an object that is truncated, extended or changed in any bit is recognised.

An object is a fixed prefix (magic, format version, length of the header, length of the
body, BLAKE2b digest of all else), a JSON header of the scalar fields, and the body: the
arrays, little- or big-endian as they came, each at a multiple of eight bytes. Nothing
in it is executed on reading.
"""

import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.config import UserError
from forge_jax.drawing import Support
from forge_jax.types import Branch, Episode, Finish, Lineage, Outcome, Rule, Status, Task, Turn

MAGIC = b"FJEP"
VERSION = 6
# 1: before turns had routes, 2: supports, 3: malformed calls, 4: a lineage, 5: agents
READABLE = (1, 2, 3, 4, 5, VERSION)
_PREFIX = struct.Struct("<4sHQQ16s")  # magic, version, header bytes, body bytes, digest
_ALIGN = 8


class CorruptObject(Exception):
    """An object that is not what was written under its key."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"corrupt object {key}: {reason}")
        self.key = key
        self.reason = reason


def encode(episodes: Sequence[Episode]) -> bytes:
    """The bytes of `episodes`; equal episodes give equal bytes.

    Raises ValueError for an array whose dtype is not boolean or a number.
    """
    body = bytearray()
    text = json.dumps(list(episodes), default=functools.partial(_plain, body), sort_keys=True)
    header = text.encode("ascii")
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGN)
    fields = (MAGIC, VERSION, len(header), len(body))
    return _PREFIX.pack(*fields, _digest(fields, header + body)) + header + body


def decode(data: bytes, key: str) -> tuple[Episode, ...]:
    """What `encode` was given; the arrays are read-only views of `data`.

    Raises CorruptObject, naming `key`, for anything `encode` cannot have written, and
    UserError for an intact object of another format version.
    """
    if len(data) < _PREFIX.size:
        raise CorruptObject(key, f"{len(data)} bytes are less than a prefix")
    *fields, digest = _PREFIX.unpack_from(data)
    content = memoryview(data)[_PREFIX.size :]
    magic, version, header, body = fields
    if magic != MAGIC:
        raise CorruptObject(key, "not an object of this pool")
    if len(content) != header + body:
        raise CorruptObject(key, f"{len(content)} bytes follow the prefix, not {header + body}")
    if digest != _digest(fields, content):
        raise CorruptObject(key, "its digest differs")
    if version not in READABLE:
        raise UserError(f"object {key} has format version {version}; this code reads {READABLE}")
    return tuple(
        _episode(record, content[header:]) for record in json.loads(bytes(content[:header]))
    )


def _digest(fields: Sequence[Any], content: bytes | memoryview) -> bytes:
    whole = hashlib.blake2b(_PREFIX.pack(*fields, b""), digest_size=16)
    whole.update(content)
    return whole.digest()


def _plain(body: bytearray, value: Any) -> Any:
    """JSON for what JSON has no word for; arrays go to the end of `body`."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise ValueError(f"an array of dtype {value.dtype} cannot be stored")
        body.extend(bytes(-len(body) % _ALIGN))
        offset = len(body)
        body.extend(value.tobytes())
        return {"dtype": value.dtype.str, "shape": value.shape, "offset": offset}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise ValueError(f"{value!r} cannot be stored")


def _array(spec: Mapping[str, Any], body: memoryview) -> np.ndarray:
    dtype, shape = np.dtype(spec["dtype"]), spec["shape"]
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(body, dtype, count, spec["offset"]).reshape(shape)


def _episode(record: Mapping[str, Any], body: memoryview) -> Episode:
    outcome = record["outcome"]
    return Episode(**{
        **record,
        "task": Task(**record["task"]),
        "outcome": Outcome(**{**outcome, "status": Status(outcome["status"])}),
        "turns": tuple(_turn(turn, body) for turn in record["turns"]),
    })  # fmt: skip


def _turn(record: Mapping[str, Any], body: memoryview) -> Turn:
    fields: dict[str, Any] = dict(record)
    support, lineage = fields.pop("support", None), fields.pop("lineage", None)
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = _array(value, body)
    if support is not None:
        arrays = {name: _array(value, body) for name, value in support.items()}
        fields["support"] = Support(**arrays)
    if lineage is not None:
        rules = {Rule(name): count for name, count in lineage["replies"].items()}
        branch = Branch(lineage["branch"])
        fields["lineage"] = Lineage(**{**lineage, "branch": branch, "replies": rules})
    fields["finish"] = Finish(record["finish"])
    return Turn(**fields)
