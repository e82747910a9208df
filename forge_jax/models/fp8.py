"""Weights stored as 8-bit floats with a scale for each block (DeepSeek-V3, arXiv 2412.19437,
section 3.3), read as what they stand for.

The tensors of a folder go in, some of them 8-bit with a tensor of scales beside them; the same
tensors come out as fp32 products of value and scale, and the scales are gone.
"""

from pathlib import Path

import numpy as np

from forge_jax.config import UserError
from forge_jax.models.hf_files import Described, Tensors
from forge_jax.models.stored import Window

SCALE = "_scale_inv"  # follows the name of the weight; the factor itself, whatever it says


class Dequantised:
    """`tensors` where weights with scales are what they stand for.

    Raises UserError on scales without a weight, or not one for each block.
    """

    def __init__(self, tensors: Tensors, blocks: tuple[int, int]):
        self._tensors, self._blocks = tensors, blocks
        self._scaled = {n.removesuffix(SCALE) for n in tensors.files if n.endswith(SCALE)}
        self.files: dict[str, Path] = {
            name: file for name, file in tensors.files.items() if not name.endswith(SCALE)
        }
        for name in sorted(self._scaled):
            scale = f"{name}{SCALE}"
            if name not in self.files:
                raise UserError(f"{tensors.files[scale]}: tensor {scale} has no weight {name}")
            shape = tensors.describe(name).shape
            wanted = tuple(-(-size // side) for size, side in zip(shape, blocks, strict=False))
            found = tensors.describe(scale).shape
            if found != wanted:
                raise UserError(
                    f"{tensors.files[scale]}: tensor {scale} has shape {found}, blocks of "
                    f"{blocks} make it {wanted}"
                )

    def describe(self, name: str) -> Described:
        found = self._tensors.describe(name)
        return found._replace(dtype=np.dtype(np.float32)) if name in self._scaled else found

    def read(self, name: str, window: Window) -> np.ndarray:
        value = self._tensors.read(name, window)
        if name not in self._scaled:
            return value
        value = value.astype(np.float32)
        ids = [
            np.arange(s.start, s.stop) // side for s, side in zip(window, self._blocks, strict=True)
        ]
        touched = tuple(slice(i[0], i[-1] + 1) for i in ids)
        scale = self._tensors.read(f"{name}{SCALE}", touched).astype(np.float32)
        value *= scale[np.ix_(*(i - i[0] for i in ids))]
        return value
