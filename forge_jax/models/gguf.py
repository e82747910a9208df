"""GGUF files of the llama architecture, read as a Hugging Face folder would be.

Quantised tensors flow in and come out as fp32 under the names of a folder, the rows of queries
and keys in the order of split-half rotary pairs; the metadata becomes a config and a chat.

Source: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Needs the `gguf` package, of the
extra of that name.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from forge_jax.config import UserError
from forge_jax.models.chat import Chat
from forge_jax.models.config import ModelConfig
from forge_jax.models.families.llama import LLAMA
from forge_jax.models.hf_chat import read_chat
from forge_jax.models.hf_files import Described
from forge_jax.models.stored import Window, assembled, check_shapes, leaves, nested

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# How text is split before merges apply, by `tokenizer.ggml.pre`.
SPLITS = {
    "smollm": (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are no part of merges
# Metadata under which the model would compute something else; without the architecture's name.
PLAIN: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("none",),
    "attention.sliding_window": (0,),
}


class GgufFile:
    """Metadata and tensors of a file. Raises UserError where it is not one we can read."""

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError as error:
            raise UserError(f"{path}: needs the package gguf: pip install gguf") from error
        self.path, self._dequantise = path, gguf.dequantize
        try:
            reader = gguf.GGUFReader(path)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file") from error
        except (ValueError, IndexError, OSError) as error:  # as it meets a broken file
            raise UserError(f"{path}: not a whole GGUF file: {error}") from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.of("general.architecture", str)
        if self.architecture != "llama":
            raise UserError(f"{path}: {self.architecture=!s} is unsupported, only llama")

    def of(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata; `default` where it is absent and there is one."""
        found = self._fields[key].contents() if key in self._fields else default
        if found is None:
            raise UserError(f"{self.path}: no {key} in its metadata")
        if type(found) is not kind:
            raise UserError(f"{self.path}: {key}={found!r} must be {kind.__name__}")
        return found

    def dequantised(self, name: str, rows: slice) -> np.ndarray:
        """Rows of a tensor, or elements of a vector, in fp32."""
        tensor = self.tensors[name]
        return self._dequantise(tensor.data[rows], tensor.tensor_type)


class GgufTensors:
    """The tensors of a file under the names and in the layout of a Hugging Face folder."""

    def __init__(self, file: GgufFile, cfg: ModelConfig):
        self._file, self._cfg = file, cfg

    def describe(self, name: str) -> Described:
        theirs = _name(name)
        if theirs not in self._file.tensors:
            raise UserError(f"{self._file.path}: tensor {theirs} is missing")
        shape = tuple(int(n) for n in reversed(self._file.tensors[theirs].shape))
        return Described(theirs, shape, np.dtype(np.float32))

    def read(self, name: str, window: Window) -> np.ndarray:
        rows, *columns = window
        value = self._file.dequantised(_name(name), rows)
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            # Theirs alternate between the two halves of a head, which pairs neighbours.
            head = self._cfg.head_dim
            value = value.reshape(-1, head // 2, 2, value.shape[-1]).swapaxes(1, 2)
            value = value.reshape(-1, value.shape[-1])
        return value[(slice(None), *columns)]


def import_gguf(
    file: GgufFile, cfg: ModelConfig, dtype: Any = np.float32, shardings: Any = None
) -> dict[str, Any]:
    """The parameters of a file whose config is `cfg`, dequantised and cast, on the devices of
    `shardings` as `hf.import_folder` puts them.

    Raises UserError naming what the file holds that we do not compute.
    """
    source = GgufTensors(file, cfg)
    found = leaves(cfg, LLAMA)
    wanted = {_name(name) for leaf in found for name in map(leaf.name, leaf.places())}
    for name in sorted(set(file.tensors) - wanted):
        raise UserError(f"{file.path}: unexpected tensor {name}")
    check_shapes(source, found, lambda name: file.path)
    return nested(found, assembled(found, source, [np.dtype(dtype)] * len(found), shardings))


def gguf_config(file: GgufFile) -> ModelConfig:
    """The sizes of the model. Raises UserError naming key and value."""

    def of(key: str, kind: type, default: Any = None) -> Any:
        return file.of(f"llama.{key}", kind, default)

    for key, allowed in PLAIN.items():
        value = of(key, type(allowed[0]), allowed[0])
        if value not in allowed:
            raise UserError(f"{file.path}: llama.{key}={value!r} is unsupported")
    embed, heads = of("embedding_length", int), of("attention.head_count", int)
    head_dim = of("attention.key_length", int, embed // heads)
    rotary = of("rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise UserError(f"{file.path}: llama.rope.dimension_count={rotary} is not {head_dim=}")
    try:
        return ModelConfig(
            family="llama",
            vocab=len(file.of("tokenizer.ggml.tokens", list)),
            embed=embed,
            layers=of("block_count", int),
            heads=heads,
            kv_heads=of("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            ffn=of("feed_forward_length", int),
            rope_theta=_shortest(of("rope.freq_base", float, 10000.0)),
            qk_norm="none",
            norm_eps=_shortest(of("attention.layer_norm_rms_epsilon", float)),
            tied="output.weight" not in file.tensors,
            max_context=of("context_length", int),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{file.path}: {error}") from error


def gguf_chat(file: GgufFile, vocab: int) -> Chat:
    """The tokenizer and chat template of a file, as if they were those of a folder."""
    tokens = file.of("tokenizer.ggml.tokens", list)
    eos = file.of("tokenizer.ggml.eos_token_id", int)
    bos = file.of("tokenizer.ggml.bos_token_id", int, -1)
    settings = {"eos_token": tokens[eos]} | ({"bos_token": tokens[bos]} if bos >= 0 else {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _tokenizer(file, tokens).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        template = file.of("tokenizer.chat_template", str, "")
        if template:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return read_chat(folder, vocab)


def _tokenizer(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE of the tokens and merges. Raises UserError on another model or split."""
    for key, known in (("model", ("gpt2",)), ("pre", tuple(SPLITS))):
        value = file.of(f"tokenizer.ggml.{key}", str)
        if value not in known:
            raise UserError(
                f"{file.path}: tokenizer.ggml.{key}={value!r} is unsupported, only one of {known}"
            )
    merges = [tuple(merge.split(" ")) for merge in file.of("tokenizer.ggml.merges", list)]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(list(SPLITS[file.of("tokenizer.ggml.pre", str)]))
    made.decoder = decoders.ByteLevel()
    kinds = file.of("tokenizer.ggml.token_type", list)
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    made.add_tokens(added)
    return made


def _name(theirs: str) -> str:
    """The name in a file of a tensor of a folder."""
    if theirs in TOP:
        return TOP[theirs]
    _, _, layer, *inside, last = theirs.split(".")
    return f"blk.{layer}.{LAYER['.'.join(inside)]}.{last}"


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from."""
    return float(str(np.float32(value)))
