"""Hugging Face folders: the same model as in `transformers`, by its logits and gradients."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMALL, TIED, draw_tokens, forward, same, weights

from forge_jax.models.chat import built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.tokenizer import ByteTokenizer

torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

LENGTH = 8


def oracle(cfg: ModelConfig, seed: int = 0) -> Any:
    """A random model of `transformers` whose norm scales are not 1."""
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=cfg.vocab,
            hidden_size=cfg.embed,
            num_hidden_layers=cfg.layers,
            num_attention_heads=cfg.heads,
            num_key_value_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            intermediate_size=cfg.ffn,
            max_position_embeddings=cfg.max_context,
            rms_norm_eps=cfg.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
            tie_word_embeddings=cfg.tied,
            initializer_range=cfg.init_std,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def oracle_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("cfg", [SMALL, TIED], ids=["untied", "tied"])
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


@pytest.mark.parametrize("cfg", [SMALL, TIED], ids=["untied", "tied"])
def test_transformers_loads_an_export(tmp_path: Path, cfg: ModelConfig) -> None:
    params = weights(cfg)
    export_folder(tmp_path / "model", cfg, params, ByteTokenizer(), built_in("chatml"))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    theirs = {k: v.numpy() for k, v in model.state_dict().items()}
    ours = flat_names(cfg, params)
    assert set(theirs) - set(ours) == ({"lm_head.weight"} if cfg.tied else set())
    same({k: theirs[k] for k in ours}, ours)
    tokens = draw_tokens(cfg, 2, LENGTH)
    expected = oracle_logits(model.eval(), tokens)
    np.testing.assert_allclose(forward(params, tokens, cfg), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cfg", [SMALL, TIED], ids=["untied", "tied"])
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
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        assert np.abs(gradient).max() > 1e-4, name
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4, err_msg=name)


def test_a_config_of_the_older_generation_is_read(tmp_path: Path) -> None:
    """`rope_theta` at the top level; no `layer_types`."""
    oracle(SMALL).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["layer_types"]
    file.write_text(json.dumps({**config, "rope_theta": 10000, "rope_scaling": None}))
    assert import_folder(tmp_path)[0] == SMALL
