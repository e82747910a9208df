"""Weights for an engine elsewhere: Hugging Face folders, one a version.

Parameters flow in; a folder that the engine can be told to read flows out. Invariant: a folder
of a version's name is whole, and the last two versions stay.
"""

import asyncio
import dataclasses
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder

VERSION = re.compile(r"v\d{8}")


class Folder:
    """Where weights are published; on a disk that both machines see under one path."""

    def __init__(self, root: Path, cfg: ModelConfig, dtype: str | None, device: Executor):
        """`dtype` of what is written; None: as the weights are. `device` has their thread."""
        self._root = root.absolute()
        self._cfg = dataclasses.replace(cfg, mtp=0)  # an engine drafts with modules of its own
        self._dtype = None if dtype is None else jnp.dtype(dtype)
        self._device = device

    async def publish(self, version: int, params: Mapping[str, Any]) -> Path:
        """Writes `params`; gives the folder, whose name has the version."""
        path = self._root / f"v{version:08}"
        policy = {name: leaf for name, leaf in params.items() if name != "mtp"}
        await asyncio.get_running_loop().run_in_executor(self._device, self._write, path, policy)
        return path

    def forget(self, version: int) -> None:
        """Removes all versions but `version` and the last before it."""
        there = sorted(p for p in self._root.iterdir() if VERSION.fullmatch(p.name))
        older = [path for path in there if path.name < f"v{version:08}"]
        for path in older[:-1]:
            shutil.rmtree(path)

    def _write(self, path: Path, params: Mapping[str, Any]) -> None:
        export_folder(path, self._cfg, params, dtype=self._dtype)
