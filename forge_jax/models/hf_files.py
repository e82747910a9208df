"""Files of a Hugging Face folder: JSON and safetensors read with named errors, folders
written whole or not at all.

Safetensors files are mapped and read in parts, and written a tensor at a time: no file is
ever whole in memory.
"""

import contextlib
import itertools
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from forge_jax.config import UserError

WEIGHTS = "model.safetensors"
MODULES = "mtp.safetensors"  # see `hf_mtp`
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}
WRITTEN = {
    WEIGHTS,
    INDEX,
    MODULES,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Described(NamedTuple):
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class _Mapped(NamedTuple):
    """A safetensors file."""

    header: dict[str, Any]  # by tensor
    map: mmap.mmap
    data: int  # where it begins in the file


class Tensors:
    """The tensors of a folder, whether in one file or in indexed shards; read in parts.

    Raises UserError naming the file that is missing or corrupt.
    """

    def __init__(self, folder: Path):
        self.files = _placed(folder)
        self._mapped: dict[Path, _Mapped] = {}
        for name, file in self.files.items():
            if file not in self._mapped:
                self._mapped[file] = _mapped(file)
            if name not in self._mapped[file].header:
                raise UserError(f"{file}: tensor {name} is missing, though {INDEX} places it here")

    def describe(self, name: str) -> Described:
        """Raises UserError naming file and tensor on a dtype that is no float."""
        said = self._mapped[self.files[name]].header[name]
        if said["dtype"] not in DTYPES:
            raise UserError(
                f"{self.files[name]}: tensor {name} has unsupported dtype {said['dtype']}"
            )
        return Described(name, tuple(said["shape"]), DTYPES[said["dtype"]])

    def read(self, name: str, window: Sequence[slice]) -> np.ndarray:
        """A part of a tensor. Only its bytes are touched, and those leave memory again."""
        file = self._mapped[self.files[name]]
        begin, end = (file.data + at for at in file.header[name]["data_offsets"])
        described = self.describe(name)
        if begin == end:
            return np.zeros(described.shape, described.dtype)[tuple(window)]
        raw = np.frombuffer(file.map, np.uint8, end - begin, begin)
        part = raw.view(described.dtype).reshape(described.shape)[tuple(window)].copy()
        page = begin - begin % mmap.PAGESIZE
        file.map.madvise(mmap.MADV_DONTNEED, page, end - page)
        return part


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: {type(value).__name__} where an object belongs")
    return value


def read_small(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file, by name. Raises UserError naming the file."""
    try:
        with safetensors.safe_open(file, framework="np") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a whole safetensors file: {error}") from error


def write_tensors(
    folder: Path,
    described: Sequence[Described],
    values: Iterable[np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Writes tensors, in order and one at a time, in one file or, where they are more than
    `max_shard_bytes`, in shards with an index. A tensor larger than that has a shard of its own.
    """
    shards: list[list[Described]] = [[]]
    for tensor in described:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    n = len(shards)
    names = [WEIGHTS] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    flow = iter(values)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, itertools.islice(flow, len(shard)))
    if n > 1:
        index = {
            "metadata": {"total_size": sum(t.bytes for t in described)},
            "weight_map": {
                t.name: name for name, shard in zip(names, shards, strict=True) for t in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def whole_folder(path: Path, own: Set[str] = WRITTEN) -> Iterator[Path]:
    """A new folder to fill; it becomes `path` when the block ends without an exception.

    An earlier export at `path`, which holds files of the names `own`, is replaced. Raises
    UserError where `path` holds anything else, so that no folder of the caller's is ever lost.
    """
    path = path.absolute()
    if path.exists():
        there = {p.name for p in path.iterdir()} - own if path.is_dir() else {path.name}
        others = {name for name in there if not (path.is_dir() and SHARD.fullmatch(name))}
        if others:
            raise UserError(f"{path}: exists and holds {min(others)!r}, not only an export")
    fresh = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if path.exists():
            shutil.rmtree(path)
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _placed(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if not (folder / INDEX).exists():
        return dict.fromkeys(_mapped(folder / WEIGHTS).header, folder / WEIGHTS)
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(f, str) for f in placed.values()):
        raise UserError(f"{folder / INDEX}: weight_map must give each tensor a file name")
    return {name: folder / file for name, file in placed.items()}


def _mapped(path: Path) -> _Mapped:
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # the library's checks of header and length
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            return _Mapped(
                header, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), 8 + length
            )
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from error


def _write_file(file: Path, tensors: Sequence[Described], values: Iterable[np.ndarray]) -> None:
    """One safetensors file: the header's length, the header, the data."""
    kinds = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        begin, end = end, end + Described(name, shape, dtype).bytes
        header[name] = {
            "dtype": kinds[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor, value in zip(tensors, values, strict=True):
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), tensor.name
            opened.write(np.ascontiguousarray(value).view(np.uint8).data)
