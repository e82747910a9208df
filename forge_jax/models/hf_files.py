"""Files of a Hugging Face folder: JSON and safetensors read with named errors, folders
written whole or not at all.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from forge_jax.config import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
WRITTEN = {
    WEIGHTS,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


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


def tensor_files(folder: Path) -> dict[str, Path]:
    """File of every tensor in the folder, whether in one file or in indexed shards.

    Raises UserError naming the file that is missing or corrupt.
    """
    if (folder / INDEX).exists():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(f, str) for f in placed.values()):
            raise UserError(f"{folder / INDEX}: weight_map must give each tensor a file name")
        files = {name: folder / file for name, file in placed.items()}
        present = {file: _names(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in present[file]:
                raise UserError(f"{file}: tensor {name} is missing, though {INDEX} places it here")
        return files
    return dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)


def read_tensor(file: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor. Raises UserError naming file and tensor on another shape or a dtype not float."""
    with _open(file) as tensors:
        found = tensors.get_slice(name)
        if tuple(found.get_shape()) != shape:
            have = tuple(found.get_shape())
            raise UserError(f"{file}: tensor {name} has shape {have}, the config says {shape}")
        if found.get_dtype() not in DTYPES:
            raise UserError(f"{file}: tensor {name} has unsupported dtype {found.get_dtype()}")
        return tensors.get_tensor(name)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; it becomes `path` when the block ends without an exception.

    An earlier export at `path` is replaced. Raises UserError where `path` holds anything
    else, so that no folder of the caller's is ever lost.
    """
    path = path.absolute()
    if path.exists():
        others = {p.name for p in path.iterdir()} - WRITTEN if path.is_dir() else {path.name}
        if others:
            raise UserError(f"export={path}: exists and holds {min(others)!r}, not only an export")
    fresh = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if path.exists():
            shutil.rmtree(path)
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _names(file: Path) -> set[str]:
    with _open(file) as tensors:
        return set(tensors.keys())


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(file, framework="np") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a whole safetensors file: {error}") from error
