"""Models by name or folder, each with the chat that belongs to it."""

import dataclasses
import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMALL, same, weights

import forge_jax.models.layout
from experiments.models import preset, presets, resolve
from forge_jax.config import UserError
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.hf import export_folder
from forge_jax.models.layout import draw, layout
from forge_jax.models.load import build, load_folder
from forge_jax.models.tokenizer import ByteTokenizer, JsonTokenizer
from forge_jax.sharding import make_mesh, shardings
from forge_jax.trees import Param, is_param

CFG = dataclasses.replace(SMALL, vocab=264)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported ChatML model."""
    export_folder(tmp_path / "model", CFG, weights(CFG), ByteTokenizer(), built_in("chatml"))
    return tmp_path / "model"


def edit(file: Path, **changes: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not None}))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("quick", 103_296),
        ("micro", 254_400),
        ("bench-10m", 10_096_640),
        ("bench-moe", 34_893_824),
        ("micro-moe", 476_608),
        # Of the published models:
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("minimax-m2", 228_689_764_864),
    ],
)
def test_presets_have_the_sizes_they_promise(name: str, size: int) -> None:
    assert name in presets()
    cfg, chat = preset(name)
    leaves = jax.tree.leaves(layout(cfg), is_leaf=is_param)
    assert sum(math.prod(p.shape) for p in leaves) == size
    assert chat.tokenizer.vocab_size <= cfg.vocab


def test_a_preset_is_a_function_of_its_seed() -> None:
    one, again, other = (resolve("quick", seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.params["embed"], again.params["embed"])
    assert not np.allclose(one.params["embed"], other.params["embed"])
    assert (one.name, one.chat.format) == ("quick", built_in("lookup"))


def test_a_fresh_model_is_the_same_on_every_mesh() -> None:
    cfg = dataclasses.replace(CFG, tied=True)
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    mesh = make_mesh(fsdp=2, context=2, tensor=2)
    placed = build(cfg, chat, 0, "small", mesh=mesh).params
    jax.tree.map(assert_on, placed, shardings(layout(cfg), mesh))
    # The same draws: how a compiler in a hurry rounds depends on how they are cut.
    near = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(near, placed, build(cfg, chat, 0, "small").params)


def test_large_models_are_drawn_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's parameters by themselves, so that no device draws what is another's."""
    monkeypatch.setattr(forge_jax.models.layout, "DRAWN_AT_ONCE", 1000)
    described = {
        "embed": Param((64, 32), ("vocab", "embed"), 0.5),
        "up": Param((24, 32, 64), ("layers", "embed", "ffn"), 2.0),
        "norm": Param((24, 32), ("layers", None), 0.0),
    }
    where = shardings(described, make_mesh(fsdp=2, tensor=2))
    placed = jax.jit(lambda key: draw(described, key, jnp.float32), out_shardings=where)
    found = placed(jax.random.key(0))
    same(found, draw(described, jax.random.key(0), jnp.float32))
    assert np.std(found["embed"]) == pytest.approx(0.5, rel=0.05)
    assert [np.std(layer) for layer in found["up"]] == pytest.approx([2.0] * 24, rel=0.1)
    assert not np.allclose(found["up"][0], found["up"][1])
    assert (found["norm"] == 1).all()
    beside = placed.lower(jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes
    assert beside < found["up"].addressable_shards[0].data.nbytes / 2  # a layer's, not all layers'


def assert_on(x: jax.Array, where: Any) -> None:
    assert x.sharding.is_equivalent_to(where, x.ndim)


def test_a_folder_is_read_onto_a_mesh(folder: Path) -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    model = resolve(str(folder), mesh=mesh)
    same(model.params, weights(CFG))
    jax.tree.map(assert_on, model.params, shardings(layout(CFG), mesh))


def test_an_unknown_model_lists_the_presets() -> None:
    with pytest.raises(UserError, match=r"model='gpt-9' .*bench-10m, .*qwen3-0\.6b"):
        resolve("gpt-9")


def test_a_folder_is_resolved_in_the_dtype_asked_for(folder: Path) -> None:
    model = resolve(str(folder), dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    assert (model.name, model.cfg) == ("model", CFG)
    with pytest.raises(UserError, match=r"config\.json"):
        resolve(str(folder.parent))


def test_a_model_smaller_than_its_tokenizer_is_refused() -> None:
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    with pytest.raises(UserError, match="vocab=61"):
        build(SMALL, chat, 0, "small")


@pytest.mark.parametrize("name", ["chatml", "lookup"])
def test_a_chat_survives_export_and_import(folder: Path, name: str) -> None:
    form = built_in(name)
    export_folder(folder, CFG, weights(CFG), ByteTokenizer(), form)
    chat = load_folder(folder).chat
    assert dataclasses.replace(chat.format, eos_token="") == form
    assert chat.stop_ids[0] == ByteTokenizer().encode(form.end_of_turn)[0]
    messages = [{"role": "user", "content": "é<|im_end|>"}]
    text = chat.format.render(messages)
    assert text == form.render(messages)
    assert chat.tokenizer.encode(text) == ByteTokenizer().encode(text)


def test_stop_ids_and_special_tokens_come_from_the_folder(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[258, 256])
    edit(folder / "tokenizer_config.json", bos_token={"content": "<|endoftext|>"}, forge_jax=None)
    chat = load_folder(folder).chat
    assert chat.stop_ids == (258, 256)
    assert (chat.format.bos_token, chat.format.tool_format) == ("<|endoftext|>", "hermes")
    # Without a token that ends a text by name, the first id that does closes a turn.
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert load_folder(folder).chat.format.end_of_turn == "<|im_end|>"


@pytest.mark.parametrize(
    "stored",
    ["{{ 1 + 1 }}", [{"name": "rag", "template": "x"}, {"name": "default", "template": "2"}]],
)
def test_templates_may_be_in_the_tokenizer_config(folder: Path, stored: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=stored)
    assert load_folder(folder).chat.format.render([]) == "2"


def test_what_a_folder_lacks_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "chat_template.jinja").unlink()
    with caplog.at_level(logging.WARNING):
        assert load_folder(folder).chat.format == dataclasses.replace(
            built_in("chatml"), eos_token="<|im_end|>"
        )
    assert "no chat template" in caplog.text
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with caplog.at_level(logging.WARNING):
        chat = load_folder(folder).chat
    assert isinstance(chat.tokenizer, ByteTokenizer)
    assert "no tokenizer" in caplog.text


def test_broken_chats_are_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="line 1"):
        load_folder(folder)
    (folder / "chat_template.jinja").write_text("ok")
    edit(folder / "tokenizer_config.json", eos_token="two tokens", forge_jax=None)
    with pytest.raises(UserError, match="'two tokens' is not one token"):
        load_folder(folder)
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(UserError, match="no eos_token"):
        load_folder(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(UserError, match=r"vocab\.json but no tokenizer\.json"):
        load_folder(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    export_folder(folder, SMALL, weights(SMALL), JsonTokenizer(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="259 ids, the model has 61"):
        load_folder(folder)
