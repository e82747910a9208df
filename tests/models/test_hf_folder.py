"""Hugging Face folders: written and read again bit for bit, tokenizer and tied matrix included."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_model import SMALL, TIED, same, weights

from forge_jax.models.chat import built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.layout import unstack
from forge_jax.models.tokenizer import ByteTokenizer


@pytest.mark.parametrize("cfg", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.float64])
def test_export_then_import_is_the_identity(tmp_path: Path, cfg: ModelConfig, dtype: Any) -> None:
    with jax.enable_x64(dtype == np.float64):
        params = weights(cfg, dtype=dtype)
        export_folder(tmp_path / "model", cfg, params)
        again, back = import_folder(tmp_path / "model")
        assert again == cfg
        same(back, params)
        same(flat_names(cfg, unstack(params, cfg)), flat_names(cfg, params))


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
