"""Folders that are not such a model are refused, by file and tensor; exports are whole."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from small_model import LLAMA, MINIMAX, SMALL, SMOL, SPARSE, weights

from forge_jax.config import UserError
from forge_jax.models.chat import built_in
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.hf_config import config_json, read_config
from forge_jax.models.tokenizer import ByteTokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return flat_names(SMALL, weights(SMALL))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    export_folder(folder, SMALL, weights(SMALL), ByteTokenizer(), built_in("chatml"))
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def refused(folder: Path, *reasons: str) -> None:
    with pytest.raises(UserError) as caught:
        import_folder(folder)
    for reason in reasons:
        assert reason in str(caught.value)


def test_the_export_itself_is_accepted(folder: Path) -> None:
    assert import_folder(folder)[0] == SMALL


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut in the header": lambda raw: raw[:50],
    "cut in the data": lambda raw: raw[:-3],
    "garbage": lambda raw: b"\x00" * len(raw),
    "header too long": lambda raw: b"\xff" * 8 + raw[8:],
    "header not JSON": lambda raw: raw[:8] + b"#" + raw[9:],
    "data too long": lambda raw: raw + b"\x00",
}


@pytest.mark.parametrize("kind", sorted(BREAKS))
def test_a_corrupt_file_is_named(folder: Path, kind: str) -> None:
    file = folder / WEIGHTS
    file.write_bytes(BREAKS[kind](file.read_bytes()))
    refused(folder, str(file), "not a whole safetensors file")


def test_wrong_tensors_are_named(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    def write(changed: dict[str, Any]) -> None:
        kept = {k: v for k, v in {**tensors, **changed}.items() if v is not None}
        safetensors.numpy.save_file(kept, folder / WEIGHTS)

    write({QUERY: None})
    refused(folder, str(folder), QUERY, "missing")
    write({QUERY: np.ascontiguousarray(tensors[QUERY].T)})
    refused(folder, WEIGHTS, QUERY, "(24, 32)", "(32, 24)")
    write({QUERY: tensors[QUERY].astype(np.int32)})
    refused(folder, WEIGHTS, QUERY, "I32")
    write({QUERY: tensors[QUERY].astype(np.float16)})
    refused(folder, WEIGHTS, QUERY, "float16")
    write({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)})
    refused(folder, WEIGHTS, "q_proj.bias", "unexpected")
    write({name: value.astype(np.float64) for name, value in tensors.items()})
    refused(folder, WEIGHTS, "jax_enable_x64")


def test_a_tied_output_matrix_that_differs_is_named(
    folder: Path, tensors: dict[str, np.ndarray]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refused(folder, WEIGHTS, "lm_head.weight", "tie_word_embeddings")


def test_wrong_shards_are_named(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    shards = {"a.safetensors": {NORM: tensors[NORM]}}
    shards["b.safetensors"] = {k: v for k, v in tensors.items() if k != NORM}
    for file, part in shards.items():
        safetensors.numpy.save_file(part, folder / file)
    places = {name: file for file, part in shards.items() for name in part}

    def index(changed: dict[str, Any]) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": {**places, **changed}}))

    (folder / WEIGHTS).unlink()
    index({})
    assert import_folder(folder)[0] == SMALL
    index({NORM: "b.safetensors"})
    refused(folder, "b.safetensors", NORM)
    index({NORM: "c.safetensors"})
    refused(folder, "c.safetensors", "no such file")
    index({NORM: 3})
    refused(folder, INDEX, "weight_map")
    (folder / INDEX).write_text("{}")
    refused(folder, INDEX, "weight_map")
    (folder / INDEX).write_text('{"weight_map"')
    refused(folder, INDEX, "not JSON")
    (folder / INDEX).unlink()
    refused(folder, WEIGHTS, "no such file")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", None),
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_theta", None),
        ("rope_theta", "10000"),
        ("hidden_size", None),
        ("hidden_size", "24"),
        ("num_hidden_layers", True),
        ("tie_word_embeddings", 1),
        ("num_key_value_heads", 3),
    ],
)
def test_an_unsupported_config_is_named(folder: Path, key: str, value: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, key: value}))
    shown = "kv_heads=3" if key == "num_key_value_heads" else key
    refused(folder, str(file), shown)


@pytest.mark.parametrize(
    ("cfg", "key", "value"),
    [
        (SPARSE, "decoder_sparse_step", 2),
        (SPARSE, "mlp_only_layers", [0]),
        (SPARSE, "shared_expert_intermediate_size", 20),
        (SPARSE, "scoring_func", "sigmoid"),
        (SPARSE, "num_experts", None),
        (SPARSE, "norm_topk_prob", 1),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "sliding_window", 16),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        (MINIMAX, "scoring_func", "softmax"),
        (MINIMAX, "use_routing_bias", False),
        (MINIMAX, "use_qk_norm", False),
        (MINIMAX, "qk_norm_type", "per_head"),
        (MINIMAX, "shared_intermediate_size", 64),
        (MINIMAX, "sliding_window", 16),
        (MINIMAX, "attn_type_list", [1, 0]),
        (MINIMAX, "router_jitter_noise", 0.1),
        (MINIMAX, "partial_rotary_factor", 0.25),
        (MINIMAX, "rotary_dim", 3),
    ],
)
def test_what_a_family_has_not_is_named(
    cfg: ModelConfig, key: str, value: Any, tmp_path: Path
) -> None:
    said = config_json(cfg, "float32")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    assert read_config(file) == cfg
    file.write_text(json.dumps({**said, key: value}))
    with pytest.raises(UserError, match=key) as caught:
        read_config(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "field", "value"),
    [
        (SMALL, "rotary_dim", 4),
        (SMALL, "qk_norm", "none"),
        (SMALL, "rope_scaling", LLAMA.rope_scaling),
        (LLAMA, "qk_norm", "head"),
        (SPARSE, "router", "sigmoid"),
        (MINIMAX, "router_bias", False),
        (MINIMAX, "norm_top", False),
    ],
)
def test_a_model_that_its_family_cannot_describe_is_not_exported(
    cfg: ModelConfig, field: str, value: Any, tmp_path: Path
) -> None:
    odd = dataclasses.replace(cfg, **{field: value})
    with pytest.raises(
        UserError, match=f"^{field}=.* no place in a folder of family='{cfg.family}'"
    ):
        export_folder(tmp_path / "model", odd, weights(odd))
    assert not (tmp_path / "model").exists()


def test_a_parameter_without_a_name_is_refused() -> None:
    odd = dataclasses.replace(LLAMA, qk_norm="head")
    with pytest.raises(UserError, match="family='llama' has no tensor for the parameter 'q_norm'"):
        flat_names(odd, weights(odd))


def test_published_configs_are_read(tmp_path: Path) -> None:
    """Keys of the published folders that transformers does not write; theirs are read elsewhere."""
    file = tmp_path / "config.json"
    said = config_json(MINIMAX, "bfloat16")
    file.write_text(
        json.dumps(
            {
                **said,
                "attn_type_list": [1, 1],
                "mlp_intermediate_size": 8192,
                "num_mtp_modules": 3,
                "mtp_transformer_layers": 1,
                "use_mtp": True,
                "layernorm_full_attention_beta": 1.0,
                "shared_moe_mode": "sigmoid",
                "sliding_window": None,
            }
        )
    )
    assert read_config(file) == MINIMAX
    said = config_json(SMOL, "bfloat16")
    del said["head_dim"], said["pretraining_tp"]
    file.write_text(json.dumps({**said, "is_llama_config": True, "rope_interleaved": False}))
    assert read_config(file) == SMOL
    said = config_json(dataclasses.replace(LLAMA, tied=False, kv_heads=4, embed=32), "bfloat16")
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings"):
        del said[key]
    file.write_text(json.dumps(said))
    assert read_config(file) == dataclasses.replace(LLAMA, kv_heads=4, embed=32)


@pytest.mark.parametrize("content", [None, "", "[1]", '{"architectures"'])
def test_a_broken_config_is_named(folder: Path, content: str | None) -> None:
    file = folder / "config.json"
    file.unlink() if content is None else file.write_text(content)
    refused(folder, str(file))


def test_an_export_replaces_an_export_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    other = weights(SMALL, seed=5)
    export_folder(folder, SMALL, other)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", WEIGHTS]
    np.testing.assert_array_equal(import_folder(folder)[1]["norm"], other["norm"])
    (tmp_path / "empty").mkdir()
    export_folder(tmp_path / "empty", SMALL, other)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=rf"^{mine}: exists and holds 'thesis\.txt'"):
        export_folder(mine, SMALL, other)
    with pytest.raises(UserError, match=r"thesis\.txt"):
        export_folder(mine / "thesis.txt", SMALL, other)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_an_export_that_fails_leaves_what_was_there(folder: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    class Failing(ByteTokenizer):
        def save(self, folder: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_folder(folder, SMALL, weights(SMALL), Failing())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir() if re.match(r"\.", p.name)] == []
