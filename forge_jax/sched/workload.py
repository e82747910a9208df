"""Reads a captured batch from a file.

A path and the model's vocabulary go in; validated samples come out. Whatever is wrong
with a file is the caller's mistake: one UserError that names the array or the sample.
"""

import zipfile
import zlib

import numpy as np

from forge_jax.config import UserError
from forge_jax.types import Sample

# The ways in which a file fails to be an archive of plain arrays, says zipfile and numpy.
CORRUPT = (
    OSError, EOFError, ValueError, RuntimeError, MemoryError, OverflowError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
REQUIRED = ("tokens", "lengths", "completion_mask", "old_logprobs", "advantages")
PER_TOKEN = "advantages_per_token"
INTEGER = ("tokens", "lengths", "completion_mask")


def read_workload(path: str, vocab: int) -> list[Sample]:
    """The samples of an ``.npz`` of flat arrays, N samples of L tokens in all.

    ``tokens i32[L]``; ``lengths i32[N]``; ``completion_mask u8[L]``, 1 at trained tokens;
    ``old_logprobs f32[L]``, the sampler's; ``advantages f32[N]``; ``advantages_per_token
    f32[L]`` is optional and wins. Other arrays are ignored.

    Raises UserError on an unreadable file, a missing or misshapen array, lengths that do
    not add up, an empty sample, an id outside [0, vocab), a mask that is not 0 or 1, a
    trained first token, or a number that is not finite.
    """
    arrays = _read(path)
    lengths = arrays["lengths"].astype(np.int64)
    empty = np.flatnonzero(lengths < 1)
    if len(empty):
        raise UserError(f"{path}: sample {empty[0]} has length {lengths[empty[0]]}")
    _check_sizes(path, arrays, lengths)
    start = np.cumsum(lengths) - lengths
    _check_values(path, arrays, start, vocab)
    mask = arrays["completion_mask"] == 1
    if PER_TOKEN in arrays:
        advantage = arrays[PER_TOKEN]
    else:
        advantage = np.repeat(arrays["advantages"], lengths)
    columns = (
        arrays["tokens"].astype(np.int32),
        mask,
        np.where(mask, arrays["old_logprobs"], 0).astype(np.float32),
        np.where(mask, advantage, 0).astype(np.float32),
    )
    rows = zip(*(np.split(column, start[1:]) for column in columns), strict=True)
    return [Sample(tokens=t, mask=m, old_logp=o, advantage=a) for t, m, o, a in rows]


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as raw, zipfile.ZipFile(raw) as file:
            present = {name.removesuffix(".npy") for name in file.namelist()}
            wanted = [name for name in (*REQUIRED, PER_TOKEN) if name in present]
            arrays = {name: _member(file, name) for name in wanted}
    except CORRUPT as error:
        raise UserError(f"workload={path} is not a readable .npz file: {error}") from error
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise UserError(f"{path}: array {missing[0]} is missing")
    for name, array in arrays.items():
        kinds = "iub" if name in INTEGER else "fiu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            kind = "integers" if name in INTEGER else "numbers"
            raise UserError(f"{path}: {name} must be one axis of {kind}, not {_shape(array)}")
    if len(arrays["lengths"]) == 0:
        raise UserError(f"{path}: lengths is empty, there are no samples")
    return arrays


def _member(file: zipfile.ZipFile, name: str) -> np.ndarray:
    with file.open(f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _shape(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _check_sizes(path: str, arrays: dict[str, np.ndarray], lengths: np.ndarray) -> None:
    total, n = int(lengths.sum()), len(lengths)
    for name, array in arrays.items():
        if name == "lengths":
            continue
        if name == "advantages":
            if len(array) != n:
                last = min(len(array), n)
                raise UserError(
                    f"{path}: advantages has {len(array)} entries, not {n} (sample {last})"
                )
        elif len(array) != total:
            # The sample at which the array runs out, or the last one if it is too long.
            at = min(int(np.searchsorted(np.cumsum(lengths), len(array), "right")), n - 1)
            raise UserError(
                f"{path}: lengths add up to {total}, {name} has {len(array)} entries (sample {at})"
            )


def _check_values(path: str, arrays: dict[str, np.ndarray], start: np.ndarray, vocab: int) -> None:
    """Refuses the first bad value of each flat array, naming its sample."""
    tokens, mask = arrays["tokens"], arrays["completion_mask"]
    first = np.zeros(len(tokens), bool)
    first[start] = True
    bad = {
        "tokens": ((tokens < 0) | (tokens >= vocab), f"is outside the vocabulary of {vocab}"),
        "completion_mask": ((mask != 0) & (mask != 1), "is neither 0 nor 1"),
        "old_logprobs": (~np.isfinite(arrays["old_logprobs"]), "is not finite"),
    }
    if PER_TOKEN in arrays:
        bad[PER_TOKEN] = (~np.isfinite(arrays[PER_TOKEN]), "is not finite")
    for name, (wrong, why) in bad.items():
        if wrong.any():
            at = int(np.argmax(wrong))
            sample = int(np.searchsorted(start, at, "right")) - 1
            place = at - start[sample]
            raise UserError(f"{path}: sample {sample}: {name}[{place}]={arrays[name][at]} {why}")
    if mask[first].any():
        sample = int(np.argmax(mask[first]))
        raise UserError(f"{path}: sample {sample} trains its first token, which has no context")
    wrong = ~np.isfinite(arrays["advantages"])
    if wrong.any():
        sample = int(np.argmax(wrong))
        raise UserError(
            f"{path}: sample {sample}: advantages={arrays['advantages'][sample]} is not finite"
        )
