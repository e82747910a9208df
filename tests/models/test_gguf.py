"""GGUF files written by the library of the format: read as the folder they were made from."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMOL, same, weights
from tokenizers import pre_tokenizers

from experiments.models import resolve
from forge_jax.config import UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import flat_names
from forge_jax.models.load import load_gguf
from forge_jax.sharding import make_mesh

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

CFG = dataclasses.replace(SMOL, embed=32, heads=4, kv_heads=2, ffn=64, vocab=262, init_std=0.02)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
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


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows as the format has them: of each head the first of both halves, the second, ..."""
    half = len(value) // heads // 2
    order = [
        head * 2 * half + side * half + i
        for head, i, side in itertools.product(range(heads), range(half), range(2))
    ]
    return value[order]


def theirs(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *inside, last = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(inside)]}.{last}"


# The characters that stand for bytes, two merges, tokens of every other kind.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "ab", "abc", "<|start|>", "<|end|>", "<tool>", "<unused>"]


def write(
    file: Path,
    cfg: ModelConfig,
    params: Any,
    kind: Any = None,
    drop: Sequence[str] = (),
    extra: Sequence[str] = (),
    **changed: Any,
) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    said: dict[str, Any] = {
        "llama.block_count": cfg.layers,
        "llama.context_length": cfg.max_context,
        "llama.embedding_length": cfg.embed,
        "llama.feed_forward_length": cfg.ffn,
        "llama.attention.head_count": cfg.heads,
        "llama.attention.head_count_kv": cfg.kv_heads,
        "llama.attention.key_length": cfg.head_dim,
        "llama.rope.freq_base": cfg.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        **changed,
    }
    for key, value in said.items():
        if key not in drop:
            add(writer, key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 258 + [3, 3, 4, 5])
    writer.add_token_merges(["a b", "ab c"])
    for name, value in flat_names(cfg, params).items():
        heads = {"q_proj": cfg.heads, "k_proj": cfg.kv_heads}.get(name.split(".")[-2])
        value = np.asarray(value if heads is None else interleaved(value, heads))
        if theirs(name) in drop:
            continue
        if kind is None or value.ndim == 1:
            writer.add_tensor(theirs(name), value)
        else:
            writer.add_tensor(theirs(name), gguf.quantize(value, kind), raw_dtype=kind)
    for name in extra:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: Any, key: str, value: Any) -> None:
    kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    kinds[type(value)](key, value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_is_read_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    cfg = dataclasses.replace(CFG, tied=tied)
    params = weights(cfg)
    file = write(tmp_path / "small.gguf", cfg, params)
    model = resolve(str(file))
    assert (model.cfg, model.name) == (cfg, "small")
    same(model.params, params)
    mesh = make_mesh(fsdp=2, tensor=2, context=2)
    placed = resolve(str(file), dtype=jnp.bfloat16, mesh=mesh).params
    assert len(placed["layers"]["q"].sharding.device_set) == 8
    same(placed["layers"]["q"], params["layers"]["q"].astype(jnp.bfloat16))


def test_quantised_tensors_are_what_they_stand_for(tmp_path: Path) -> None:
    params = weights(CFG)
    kind = gguf.GGMLQuantizationType.Q8_0
    read = load_gguf(write(tmp_path / "small.gguf", CFG, params, kind)).params
    for name, value in flat_names(CFG, params).items():
        found = flat_names(CFG, read)[name]
        if value.ndim == 1:
            np.testing.assert_array_equal(found, value)
            continue
        # 32 neighbours of a row share a scale; a step is about a 127th of the largest.
        block = value.reshape(-1, 32)
        step = np.abs(block).max(1, keepdims=True) / 127
        assert (np.abs(found.reshape(-1, 32) - block) < 0.6 * step).all(), name
        assert (found != value).any(), name


def test_the_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    chat = load_gguf(write(tmp_path / "small.gguf", CFG, weights(CFG))).chat
    assert chat.tokenizer.vocab_size == 262
    assert chat.stop_ids == (259,)
    assert chat.format.render([{"role": "user", "content": "abc"}]) == "abc"
    assert chat.format.bos_token == "<|start|>"
    encode = chat.tokenizer.encode
    assert encode("abcab") == [257, 256]
    assert encode("<|start|>a<tool>") == [258, BYTES.index("a"), 260]
    assert chat.tokenizer.special_id("<|end|>") == 259
    assert encode("12 1") == [BYTES.index(char) for char in "12Ġ1"]
    text = "naïve 🙂\n<|end|>"
    assert chat.tokenizer.decode(encode(text)) == text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count=4"),
        ({"llama.block_count": "2"}, "llama.block_count='2' must be int"),
        ({"llama.attention.head_count_kv": 3}, "kv_heads=3"),
        ({"llama.feed_forward_length": 65}, r"blk.0.ffn_gate.weight.* the config says \(65, 32\)"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre='other'"),
        ({"drop": ["llama.block_count"]}, "no llama.block_count"),
        ({"drop": ["blk.1.attn_q.weight"]}, "tensor blk.1.attn_q.weight is missing"),
        ({"extra": ["rope_freqs.weight"]}, "unexpected tensor rope_freqs.weight"),
        ({"general.architecture": "falcon"}, "architecture=falcon"),
    ],
)
def test_what_we_do_not_compute_is_named(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "small.gguf", CFG, weights(CFG), **changed)
    with pytest.raises(UserError, match=said) as caught:
        load_gguf(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", ["garbage", "empty", "cut", "missing"])
def test_a_broken_file_is_named(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "small.gguf", CFG, weights(CFG))
    raw = file.read_bytes()
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes({"garbage": b"?" * 100, "empty": b"", "cut": raw[: len(raw) // 2]}[kind])
    with pytest.raises(UserError, match=r"small\.gguf: "):
        load_gguf(file)
