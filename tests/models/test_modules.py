"""Prediction modules in files, beside a model that is nobody else's business."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_model import MINIMAX, SMALL, draw_tokens, forward, same, weights

from forge_jax.config import UserError
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, import_folder
from forge_jax.models.layout import layout
from forge_jax.models.load import build
from forge_jax.models.mtp import grown
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout import programs
from forge_jax.sharding import make_mesh, shardings

DEEP = dataclasses.replace(SMALL, mtp=2)
ROUTED = dataclasses.replace(
    DEEP, family="qwen3_moe", experts=3, experts_per_token=2, ffn=8, init_std=0.2
)
WIDE = dataclasses.replace(MINIMAX, mtp=2)


@pytest.mark.parametrize("cfg", [DEEP, ROUTED, WIDE], ids=["dense", "experts", "minimax"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_modules_are_written_and_read_bit_for_bit(
    tmp_path: Path, cfg: ModelConfig, dtype: Any
) -> None:
    params = weights(cfg, dtype=dtype)
    export_folder(tmp_path / "model", cfg, params)
    again, back = import_folder(tmp_path / "model")
    assert again == cfg
    same(back, params)
    export_folder(tmp_path / "model", cfg, params)  # an export with modules is one to replace


def test_a_cast_keeps_what_is_wide_in_modules_too(tmp_path: Path) -> None:
    params = weights(WIDE)
    export_folder(tmp_path / "float32", WIDE, params)
    export_folder(tmp_path / "bfloat16", WIDE, params, dtype=jnp.bfloat16)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name in ("router", "router_bias"):
        expected["layers"][name] = params["layers"][name]
        expected["mtp"]["block"][name] = params["mtp"]["block"][name]
    same(import_folder(tmp_path / "float32", jnp.bfloat16)[1], expected)
    same(import_folder(tmp_path / "bfloat16")[1], expected)


def test_names_and_layout_are_those_of_deepseek(tmp_path: Path) -> None:
    params = weights(DEEP)
    export_folder(tmp_path / "model", DEEP, params)
    found = safetensors.numpy.load_file(tmp_path / "model" / "mtp.safetensors")
    ours = params["mtp"]
    project = found["model.layers.3.eh_proj.weight"]  # layers 0 and 1 are the model's
    np.testing.assert_array_equal(project, ours["project"][1].T)
    np.testing.assert_array_equal(found["model.layers.2.enorm.weight"], ours["token_norm"][0])
    np.testing.assert_array_equal(found["model.layers.2.hnorm.weight"], ours["state_norm"][0])
    q = ours["block"]["q"][1].reshape(DEEP.embed, -1).T
    np.testing.assert_array_equal(found["model.layers.3.self_attn.q_proj.weight"], q)


def test_transformers_does_not_trip_over_modules(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    params = weights(DEEP)
    export_folder(tmp_path / "model", DEEP, params)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = draw_tokens(DEEP, 1, 6)
    with torch.no_grad():
        theirs = model.eval()(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(forward(params, tokens, DEEP), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.enorm.weight"), "2.enorm.weight is missing"),
        (lambda t: t.update({"model.layers.2.more": np.ones(1)}), "2.more is unexpected"),
        (lambda t: t.update({"model.layers.2.enorm.weight": np.ones(3)}), "has shape"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    export_folder(tmp_path / "model", DEEP, weights(DEEP))
    file = tmp_path / "model" / "mtp.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        import_folder(tmp_path / "model")


def test_a_model_is_given_modules_and_stays_what_it_was() -> None:
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
    model = build(dataclasses.replace(SMALL, vocab=264), chat, seed=0, name="small")
    deep = grown(model, 2, seed=3)
    assert deep.cfg == dataclasses.replace(model.cfg, mtp=2)
    same({k: v for k, v in deep.params.items() if k != "mtp"}, model.params)
    same(deep.params, grown(model, 2, seed=3).params)
    assert np.any(deep.params["mtp"]["project"] != grown(model, 2, seed=4).params["mtp"]["project"])
    assert grown(deep, 2, seed=5) is deep
    assert grown(deep, 0, seed=5) is deep
    with pytest.raises(UserError, match=r"mtp\.depth=1: small has 2 modules"):
        grown(deep, 1, seed=3)


def test_modules_are_drawn_where_they_belong() -> None:
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
    cfg, mesh = dataclasses.replace(SMALL, vocab=264), make_mesh(fsdp=2, tensor=2)
    alone = grown(build(cfg, chat, seed=0, name="small"), 2, seed=3)
    spread = grown(build(cfg, chat, seed=0, name="small", mesh=mesh), 2, seed=3)
    where = jax.tree.map(lambda x: x.sharding, spread.params)
    assert where == shardings(layout(alone.cfg), mesh)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
        spread.params["mtp"],
        alone.params["mtp"],
    )


def test_the_engine_leaves_modules_behind() -> None:
    params = weights(DEEP)
    taken = programs.publish(params, cfg=DEEP)
    assert taken.keys() == params.keys() - {"mtp"}
    tokens = draw_tokens(DEEP, 2, 5)
    alone = {k: v for k, v in params.items() if k != "mtp"}
    np.testing.assert_array_equal(forward(taken, tokens, DEEP), forward(alone, tokens, SMALL))
    assert not jax.tree.leaves(params["mtp"])[0].is_deleted()
