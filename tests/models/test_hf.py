"""Hugging Face folders of every family: the same model as in `transformers`, by its logits and
gradients."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import oracle, oracle_logits, published_names, torch, transformers
from small_model import FAMILIES, LLAMA, MINIMAX, SMALL, SPARSE, TIED, draw_tokens, forward, same
from small_model import weights as random_weights

from forge_jax.models.chat import built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.tokenizer import ByteTokenizer

LENGTH = 32  # more than the context before which Llama's frequencies are not stretched
every_family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


@every_family
@pytest.mark.parametrize("shard", ["5GB", "8KB"], ids=["one_file", "shards"])
def test_a_model_of_transformers_gives_its_logits(
    tmp_path: Path, cfg: ModelConfig, shard: str
) -> None:
    model = oracle(cfg)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "8KB")
    read, params = import_folder(tmp_path)
    assert read == cfg
    tokens = draw_tokens(cfg, 2, LENGTH)
    expected = oracle_logits(model, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(forward(params, tokens, cfg), expected, rtol=0, atol=1e-4)


@every_family
def test_transformers_loads_an_export(tmp_path: Path, cfg: ModelConfig) -> None:
    params = random_weights(cfg)
    folder = tmp_path / "model"
    chat = built_in("chatml")
    export_folder(folder, cfg, params, ByteTokenizer(), chat, max_shard_bytes=20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    theirs = published_names({k: v.numpy() for k, v in model.state_dict().items()}, cfg)
    ours = flat_names(cfg, params)
    assert set(theirs) - set(ours) == ({"lm_head.weight"} if cfg.tied else set())
    same({k: theirs[k] for k in ours}, ours)
    tokens = draw_tokens(cfg, 2, LENGTH)
    expected = oracle_logits(model.eval(), tokens)
    np.testing.assert_allclose(forward(params, tokens, cfg), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "cfg", [SMALL, TIED, SPARSE, MINIMAX], ids=["qwen3", "qwen3_tied", "qwen3_moe", "minimax_m2"]
)
def test_gradients_have_the_names_of_transformers(tmp_path: Path, cfg: ModelConfig) -> None:
    model = oracle(cfg)
    model.save_pretrained(tmp_path)
    _, params = import_folder(tmp_path)
    tokens = draw_tokens(cfg, 2, LENGTH)

    def loss(params: Any) -> Any:
        logp = jax.nn.log_softmax(forward(params, tokens, cfg)[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    ours = flat_names(cfg, jax.jit(jax.grad(loss))(params))
    ids = torch.as_tensor(tokens, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    named = {name: p.grad.numpy() for name, p in model.named_parameters()}
    theirs = published_names(named, cfg)
    biases = {name for name in ours if name.endswith("e_score_correction_bias")}
    assert set(ours) == set(theirs) | biases
    for name, gradient in theirs.items():
        assert np.abs(gradient).max() > 1e-4, name
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4, err_msg=name)
    for name in biases:  # they choose and do not weigh
        assert not ours[name].any(), name


@pytest.mark.parametrize("cfg", [LLAMA, SPARSE], ids=["llama", "qwen3_moe"])
def test_a_model_in_bfloat16_gives_its_logits(tmp_path: Path, cfg: ModelConfig) -> None:
    oracle(cfg).save_pretrained(tmp_path / "wide")
    _, params = import_folder(tmp_path / "wide")
    export_folder(tmp_path / "narrow", cfg, params, dtype=jnp.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "narrow").eval()
    assert model.dtype == torch.bfloat16
    _, narrow = import_folder(tmp_path / "narrow")
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}
    _, wide = import_folder(tmp_path / "narrow", jnp.float32)
    tokens = draw_tokens(cfg, 2, LENGTH)
    exact, ours = (np.asarray(forward(p, tokens, cfg)) for p in (wide, narrow))
    theirs = oracle_logits(model, tokens)
    # Each is as far from the logits of the same weights in fp32 as the other.
    assert np.abs(ours - exact).mean() < 1.5 * np.abs(theirs - exact).mean()
    assert np.abs(ours - exact).mean() < 0.05 * np.abs(exact).mean()


def test_logits_agree_in_double_precision(tmp_path: Path) -> None:
    model = oracle(SMALL).double()
    model.save_pretrained(tmp_path)
    tokens = draw_tokens(SMALL, 2, LENGTH)
    with jax.enable_x64(True):
        cfg, params = import_folder(tmp_path)
        ours = forward(params, tokens, cfg)
        assert ours.dtype == jnp.float64
        # Its angles, norms' statistics and attention's softmax stay in fp32.
        np.testing.assert_allclose(ours, oracle_logits(model, tokens), rtol=0, atol=1e-4)


def test_a_config_of_the_older_generation_is_read(tmp_path: Path) -> None:
    """`rope_theta` at the top level; no `layer_types`."""
    oracle(SMALL).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["layer_types"]
    file.write_text(json.dumps({**config, "rope_theta": 10000, "rope_scaling": None}))
    assert import_folder(tmp_path)[0] == SMALL
