"""Hugging Face folders: written and read again bit for bit, by parts, in every family."""

import dataclasses
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_model import FAMILIES, MINIMAX, SMALL, SPARSE, TIED, same, weights

from forge_jax.config import UserError
from forge_jax.models.chat import built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.hf_files import Tensors
from forge_jax.models.layout import layout, unstack
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.sharding import make_mesh, shardings

every_family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every read from a folder: the tensor and its bytes."""
    made: list[tuple[str, int]] = []
    read = Tensors.read

    def counted(self: Tensors, name: str, window: Sequence[slice]) -> np.ndarray:
        value = read(self, name, window)
        made.append((name, value.nbytes))
        return value

    monkeypatch.setattr(Tensors, "read", counted)
    return made


@every_family
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("limit", [10**9, 5_000], ids=["one_file", "shards"])
def test_export_then_import_is_the_identity(
    tmp_path: Path, cfg: ModelConfig, dtype: Any, limit: int
) -> None:
    params = weights(cfg, dtype=dtype)
    export_folder(tmp_path / "model", cfg, params, max_shard_bytes=limit)
    again, back = import_folder(tmp_path / "model")
    assert again == cfg
    same(back, params)
    same(flat_names(cfg, unstack(params, cfg)), flat_names(cfg, params))
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 3) == (limit == 5_000)
    for file in files:
        held = safetensors.numpy.load_file(file)  # by the library's own reader
        largest = max(value.nbytes for value in held.values())
        assert sum(value.nbytes for value in held.values()) <= max(limit, largest)
        same(held, {name: flat_names(cfg, params)[name] for name in held})


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_kept_too(tmp_path: Path, dtype: Any) -> None:
    with jax.enable_x64(True):
        params = weights(TIED, dtype=dtype)
        export_folder(tmp_path / "model", TIED, params)
        same(import_folder(tmp_path / "model")[1], params)


@every_family
def test_shards_read_their_own_bytes_once(
    tmp_path: Path, cfg: ModelConfig, reads: list[tuple[str, int]]
) -> None:
    """On eight devices, whatever a dimension does not divide by, and replicas beside shards."""
    cfg = dataclasses.replace(cfg, heads=4, kv_heads=2, vocab=62)
    params = weights(cfg)
    export_folder(tmp_path / "model", cfg, params)
    where = shardings(layout(cfg), make_mesh(data=1, fsdp=2, expert=2, tensor=2))
    _, placed = import_folder(tmp_path / "model", shardings=where)
    same(placed, params)
    jax.tree.map(assert_on, placed, where)
    stored = {name: value.nbytes for name, value in flat_names(cfg, params).items()}
    assert sum(size for _, size in reads) == sum(stored.values())
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"):
        parts = [size for read, size in reads if read == name]
        assert parts == [stored[name] / 8] * 8
    assert [n for n, _ in reads].count("model.norm.weight") == 1  # for all eight


def assert_on(x: jax.Array, where: Any) -> None:
    assert x.sharding.is_equivalent_to(where, x.ndim)
    assert {s.data.size for s in x.addressable_shards} == {math.prod(where.shard_shape(x.shape))}


@pytest.fixture
def peak() -> Iterator[Any]:
    """Bytes of numpy arrays and Python objects at their most since the fixture was asked."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_no_model_is_in_host_memory_twice(tmp_path: Path, peak: Any) -> None:
    cfg = dataclasses.replace(SPARSE, embed=64, ffn=128, layers=12, experts=8, vocab=256)
    params = weights(cfg)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.nbytes for x in jax.tree.leaves(params["layers"]))
    assert total > 8e6
    assert largest > total / 4
    where = shardings(layout(cfg), make_mesh(fsdp=8))
    placed = jax.device_put(params, where)
    del params
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    export_folder(tmp_path / "model", cfg, placed)
    # A layer's experts leave the devices together, and are written one by one.
    assert peak() - before < largest / cfg.layers * 3 + 1e6
    del placed
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    _kept = import_folder(tmp_path / "model", jnp.bfloat16, where)
    # Arrays of CPU devices may be numpy's own memory: the model once, and a part beside it.
    assert peak() - before < total / 2 + 2 * largest / 8 + 1e6


@pytest.mark.parametrize("where", ["on one device", "sharded"])
def test_a_cast_rounds_once_and_keeps_what_is_wide(tmp_path: Path, where: str) -> None:
    params = weights(MINIMAX)
    export_folder(tmp_path / "wide", MINIMAX, params)
    export_folder(tmp_path / "narrow", MINIMAX, params, dtype=jnp.bfloat16)
    stored = safetensors.numpy.load_file(tmp_path / "narrow" / "model.safetensors")
    kept = {name for name, value in stored.items() if value.dtype == np.float32}
    router = "model.layers.0.block_sparse_moe"
    assert {n for n in kept if ".0." in n} == {
        f"{router}.gate.weight",
        f"{router}.e_score_correction_bias",
    }
    mesh = make_mesh(fsdp=8)
    places = shardings(layout(MINIMAX), mesh) if where == "sharded" else None
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name in ("router", "router_bias"):
        expected["layers"][name] = params["layers"][name]
    same(import_folder(tmp_path / "wide", jnp.bfloat16, places)[1], expected)
    same(import_folder(tmp_path / "narrow", shardings=places)[1], expected)
    same(import_folder(tmp_path / "wide", jnp.float32, places)[1], params)


def test_several_dtypes_are_read_where_one_is_asked_for(tmp_path: Path) -> None:
    params = weights(SMALL)
    export_folder(tmp_path / "model", SMALL, params)
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(jnp.bfloat16)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=f"{name} is bfloat16, others are float32; .* dtype"):
        import_folder(tmp_path / "model")
    up = params["layers"].pop("up")
    _, back = import_folder(tmp_path / "model", jnp.float32)
    np.testing.assert_array_equal(back["layers"].pop("up")[1], up[1].astype(jnp.bfloat16))
    same(back["layers"], params["layers"])


def test_transformers_loads_the_exported_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cfg = dataclasses.replace(SMALL, vocab=264)
    form = built_in("chatml")
    export_folder(tmp_path / "model", cfg, weights(cfg), ByteTokenizer(), form)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "naïve 🙂 "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == form.render(messages)
    ids = ByteTokenizer().encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 258


def test_a_tied_model_may_store_its_output_matrix(tmp_path: Path) -> None:
    export_folder(tmp_path / "model", TIED, weights(TIED))
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, file)
    _, params = import_folder(tmp_path / "model")
    assert "unembed" not in params
