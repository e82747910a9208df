"""Folders that are not such a model are refused, by file and tensor; exports are whole."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from small_model import SMALL, weights

from forge_jax.config import UserError
from forge_jax.models.chat import built_in
from forge_jax.models.hf import export_folder, flat_names, import_folder
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
    with pytest.raises(UserError, match=r"thesis\.txt"):
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
