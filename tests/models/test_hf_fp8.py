"""Folders of 8-bit weights with a scale for each block, as MiniMax-M2 is published."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
from oracle import torch
from small_model import MINIMAX, same, weights

from forge_jax.config import UserError
from forge_jax.models.hf import export_folder, flat_names, import_folder
from forge_jax.models.layout import layout
from forge_jax.sharding import make_mesh, shardings

ROWS, COLUMNS = 10, 16  # of a block; they divide few of the matrices
NAME = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
METHOD = {"quant_method": "fp8", "fmt": "e4m3fn", "activation_scheme": "dynamic"}
KEPT = ("embed_tokens", "lm_head", "norm", ".gate.", "e_score_correction_bias")


def quantised(value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """8-bit values, the scale of each block, and what they stand for, block by block."""
    blocks = [-(-n // side) for n, side in zip(value.shape, (ROWS, COLUMNS), strict=True)]
    small = np.zeros(value.shape, jnp.float8_e4m3fn)
    scale, stands = np.zeros(blocks, np.float32), np.zeros(value.shape, np.float32)
    for i, j in np.ndindex(*blocks):
        at = (
            slice(i * ROWS, (i + 1) * ROWS),
            slice(j * COLUMNS, (j + 1) * COLUMNS),
        )
        scale[i, j] = np.abs(value[at]).max() / 448  # the largest of the 8-bit floats
        small[at] = (value[at] / scale[i, j]).astype(jnp.float8_e4m3fn)
        stands[at] = small[at].astype(np.float32) * scale[i, j]
    return small, scale, stands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder as it is published, and the weights it stands for under their names."""
    folder = tmp_path_factory.mktemp("fp8") / "model"
    params = weights(MINIMAX)
    export_folder(folder, MINIMAX, params)
    stored: dict[str, Any] = {}
    stands: dict[str, np.ndarray] = {}
    for name, value in flat_names(MINIMAX, params).items():
        if any(part in name for part in KEPT):
            wide = ".gate." in name or "bias" in name
            stands[name] = value if wide else value.astype(jnp.bfloat16).astype(np.float32)
            stored[name] = torch.tensor(stands[name]).to(torch.float32 if wide else torch.bfloat16)
        else:
            small, scale, stands[name] = quantised(value)
            stored[name] = torch.tensor(small.view(np.uint8)).view(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.tensor(scale)
    write(folder, stored)
    configure(folder, {**METHOD, "weight_block_size": [ROWS, COLUMNS]})
    return folder, stands


def write(folder: Path, stored: dict[str, Any]) -> None:
    safetensors.torch.save_file(stored, folder / "model.safetensors")


def configure(folder: Path, quantisation: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize("where", ["on one device", "sharded"])
def test_weights_are_what_they_stand_for(
    folder: tuple[Path, dict[str, np.ndarray]], where: str
) -> None:
    path, stands = folder
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    places = shardings(layout(MINIMAX), mesh) if where == "sharded" else None
    cfg, params = import_folder(path, jnp.float32, places)
    assert cfg == MINIMAX
    same(flat_names(cfg, params), stands)
    _, narrow = import_folder(path, jnp.bfloat16, places)
    assert narrow["layers"]["router"].dtype == jnp.float32
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"]["down"])
    same(narrow["layers"]["down"], expected)


def test_a_dtype_must_be_asked_for(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(UserError, match=r"is float32, others are bfloat16; .* dtype is asked"):
        import_folder(folder[0])


def test_other_quantisations_are_refused(
    folder: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path = folder[0].rename(tmp_path / "model")
    stored = safetensors.torch.load_file(path / "model.safetensors")
    for said in ({"quant_method": "gptq", "bits": 4}, METHOD, "fp8"):
        configure(path, said)
        with pytest.raises(UserError, match=r"quantization_config=.* only quant_method 'fp8'"):
            import_folder(path, jnp.float32)
    configure(path, None)
    with pytest.raises(UserError, match=r"unexpected tensor .*_scale_inv"):
        import_folder(path, jnp.float32)
    configure(path, {**METHOD, "weight_block_size": [ROWS, COLUMNS // 2]})
    with pytest.raises(UserError, match=r"_scale_inv has shape .* blocks of \(10, 8\)"):
        import_folder(path, jnp.float32)
    configure(path, {**METHOD, "weight_block_size": [ROWS, COLUMNS]})
    write(path, {n: v for n, v in stored.items() if n != NAME})
    with pytest.raises(UserError, match=f"{NAME}_scale_inv has no weight {NAME}"):
        import_folder(path, jnp.float32)
    write(path, {n: v for n, v in stored.items() if n != f"{NAME}_scale_inv"})
    with pytest.raises(UserError, match=f"{NAME} is float8_e4m3fn without a scale"):
        import_folder(path, jnp.float32)
