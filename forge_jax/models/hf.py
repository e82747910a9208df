"""Parameters under Hugging Face names, in and out of folders.

A folder (`config.json`, safetensors, perhaps in shards) flows in and becomes a config
and parameters on their devices; the same flow out. Values are moved and transposed, and
rounded only to a dtype that is asked for: what was exported is imported bit for bit. Every
refusal names the file and the tensor.
"""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from forge_jax.config import UserError
from forge_jax.models.chat import ChatFormat
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.family import Family
from forge_jax.models.fp8 import Dequantised
from forge_jax.models.hf_chat import write_chat
from forge_jax.models.hf_config import FAMILIES, config_json, read_config, weight_blocks
from forge_jax.models.hf_files import Described, Tensors, whole_folder, write_tensors
from forge_jax.models.hf_mtp import with_modules, write_modules
from forge_jax.models.stored import Leaf, assembled, check_shapes, dtype_of, leaves, nested
from forge_jax.models.tokenizer import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000
HEAD = "lm_head.weight"
VERDICT = 1024  # bytes of a refusal that the first process tells the others
ROWS = 4096  # of the embedding and the output matrix, compared at once
T = TypeVar("T")


def import_folder(
    path: str | Path, dtype: Any = None, shardings: Any = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and parameters of a Hugging Face folder, in the dtype they are stored in or cast.

    `shardings` has a sharding for every parameter, as `sharding.shardings(layout(cfg), mesh)`;
    each process then reads only what its devices hold. What the family keeps in fp32 (a router,
    where it says so) stays fp32 under a cast to 16 bits. 8-bit weights with scales by block are
    read where a dtype is asked for.

    Raises UserError naming file and tensor: files missing or corrupt, an architecture or
    feature that we do not compute, tensors missing, unexpected, of another shape, or of several
    dtypes where none is asked for.
    """
    folder = Path(path)
    cfg = read_config(folder / "config.json")
    blocks = weight_blocks(folder / "config.json")
    tensors = Tensors(folder)
    source = Dequantised(tensors, blocks) if blocks else tensors
    family = FAMILIES[cfg.family]
    found = leaves(cfg, family)
    _check_names(source.files, found, cfg, folder)
    check_shapes(source, found, source.files.__getitem__)
    dtypes = _dtypes(source, found, family, dtype)
    if cfg.tied and HEAD in source.files:
        _check_tie(source, found[0])
    params = nested(found, assembled(found, source, dtypes, shardings))
    return with_modules(folder, cfg, params, dtype)


def export_folder(
    path: str | Path,
    cfg: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    chat_format: ChatFormat | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that `import_folder` and `transformers` load, whole or not at all.

    Weights are cast to `dtype` (but for what the family keeps in fp32) and written a layer's
    parameter at a time, in shards of at most `max_shard_bytes`: only that much leaves the
    devices at once. Of several processes all call this, and the first writes. Raises UserError, in
    all of them, where the first one's `path` holds something other than an earlier export, or the
    family's folders cannot say something of the model.
    """
    family = FAMILIES[cfg.family]
    common = dtype_of("embed", params["embed"].dtype, dtype, family)
    config = config_json(dataclasses.replace(cfg, mtp=0), common.name)
    pieces = _pieces(cfg, params)
    each = [(p, dtype_of(p.leaf.ours, p.held.dtype, dtype, family)) for p in pieces]
    described = [Described(n, p.leaf.stored_shape, kind) for p, kind in each for n in p.names()]
    values = (value.astype(kind, copy=False) for p, kind in each for value in p.tensors())
    with contextlib.ExitStack() as stack:
        begin = partial(_begun, stack, Path(path), config, tokenizer, chat_format)
        folder = _first(begin)  # all that can be refused is, before anything is gathered
        modules = jax.tree.map(_host, params["mtp"]) if cfg.mtp else None
        if folder is None:
            collections.deque(values, maxlen=0)  # this process's part of every gathering
        else:
            write_tensors(folder, described, values, max_shard_bytes)
            write_modules(folder, cfg, modules, dtype)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("export")


def _begun(
    stack: contextlib.ExitStack,
    path: Path,
    config: dict[str, Any],
    tokenizer: Tokenizer | None,
    chat_format: ChatFormat | None,
) -> Path:
    """A folder with all but weights, that becomes `path` when `stack` is left."""
    folder = stack.enter_context(whole_folder(path))
    if tokenizer is not None:
        config = config | write_chat(folder, tokenizer, chat_format)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def _first(work: Callable[[], T]) -> T | None:
    """What `work` makes in the first of several processes, None in the others.

    Where it raises, all raise: none goes on to wait for the first.
    """
    made, failed = None, None
    if jax.process_index() == 0:
        try:
            made = work()
        except Exception as error:
            failed = error
    if jax.process_count() > 1:
        text = "" if failed is None else str(failed) or type(failed).__name__
        told = np.frombuffer(text.encode()[:VERDICT].ljust(VERDICT, b"\0"), np.uint8)
        heard = np.asarray(multihost_utils.broadcast_one_to_all(told)).astype(np.uint8)
        text = heard.tobytes().rstrip(b"\0").decode(errors="ignore")
        failed = failed or (UserError(text) if text else None)
    if failed is not None:
        raise failed
    return made


def flat_names(cfg: ModelConfig, tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A params-shaped tree (weights, gradients) under their names in their layout.

    Layers may be stacked or unstacked. Tied models have no `lm_head.weight`.
    """
    return {
        name: np.ascontiguousarray(value)
        for piece in _pieces(cfg, tree)
        for name, value in zip(piece.names(), piece.tensors(), strict=True)
    }


class _Piece(NamedTuple):
    """What leaves the devices at once: a parameter outside the layers, or of one layer."""

    leaf: Leaf
    at: tuple[int, ...]  # the layer; empty outside
    held: Any
    stacked: bool  # `held` is of all layers

    def names(self) -> list[str]:
        if self.leaf.lead < 2:
            return [self.leaf.name(self.at)]
        return [self.leaf.name((*self.at, expert)) for expert in range(self.leaf.shape[1])]

    def tensors(self) -> Iterator[np.ndarray]:
        """Its tensors in their layout, on the host."""
        value = _of_layer(self.held, *self.at) if self.stacked else _host(self.held)
        return map(self.leaf.outward, value if self.leaf.lead == 2 else [value])


def _pieces(cfg: ModelConfig, tree: Mapping[str, Any]) -> list[_Piece]:
    layers = tree["layers"]
    stacked = isinstance(layers, Mapping)
    found = leaves(cfg, FAMILIES[cfg.family])
    outside = [_Piece(leaf, (), tree[leaf.ours], False) for leaf in found if not leaf.lead]
    return outside + [
        _Piece(leaf, (i,), layers[leaf.ours] if stacked else layers[i][leaf.ours], stacked)
        for i in range(cfg.layers)
        for leaf in found
        if leaf.lead
    ]


def _of_layer(stacked: Any, layer: int) -> np.ndarray:
    """One layer of a stacked parameter, on the host; the others stay where they are."""
    if isinstance(stacked, np.ndarray):
        return stacked[layer]
    return _host(_layer(stacked, layer))


def _host(x: Any) -> np.ndarray:
    """The whole of `x`, of which other processes may hold parts."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


@jax.jit
def _layer(stacked: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _dtypes(
    source: Tensors | Dequantised, found: Sequence[Leaf], family: Family, dtype: Any
) -> list[np.dtype]:
    """The dtype of every parameter, in the order of `found`."""
    common = source.describe(found[0].name(())).dtype
    made = []
    for leaf in found:
        for name in map(leaf.name, leaf.places()):
            stored = source.describe(name).dtype
            kept = leaf.ours in family.wide and stored == np.float32
            if stored.itemsize == 1:
                raise UserError(f"{source.files[name]}: tensor {name} is {stored} without a scale")
            if dtype is None and stored != common and not kept:
                raise UserError(
                    f"{source.files[name]}: tensor {name} is {stored}, others are {common}; "
                    "they are read where a dtype is asked for"
                )
        made.append(dtype_of(leaf.ours, stored, dtype, family))
    if np.dtype(np.float64) in made and jnp.result_type(float) != np.float64:
        raise UserError(f"{source.files[found[0].name(())]}: float64 weights need jax_enable_x64")
    return made


def _check_names(
    files: Mapping[str, Path], found: Sequence[Leaf], cfg: ModelConfig, folder: Path
) -> None:
    wanted = {name for leaf in found for name in map(leaf.name, leaf.places())}
    for name in sorted(wanted - set(files)):
        raise UserError(f"{folder}: tensor {name} is missing")
    # A tied model may store its output matrix too; it is then checked against the embedding.
    for name in sorted(set(files) - wanted - ({HEAD} if cfg.tied else set())):
        raise UserError(f"{files[name]}: unexpected tensor {name}")


def _check_tie(source: Tensors | Dequantised, embed: Leaf) -> None:
    name, (vocab, width) = embed.name(()), embed.shape
    same = source.describe(HEAD).shape == embed.shape and all(
        np.array_equal(source.read(HEAD, part), source.read(name, part))
        for begin in range(0, vocab, ROWS)
        for part in [(slice(begin, begin + ROWS), slice(0, width))]
    )
    if not same:
        raise UserError(
            f"{source.files[HEAD]}: tensor {HEAD} differs from the embedding, though "
            "tie_word_embeddings=True"
        )
