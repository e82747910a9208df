"""The plan: its JSON, what fits and what does not, what it refuses, and its closed form."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from experiments.plan import main, run
from experiments.planning import search
from experiments.planning.config import PlanConfig, read
from experiments.planning.measure import out_of_memory
from experiments.planning.models import sizes
from experiments.planning.topology import parse
from forge_jax.config import MeshConfig, UserError
from forge_jax.rl import ranks

ROOT = Path(__file__).parent.parent.parent
KEYS = {
    "fits", "hbm_per_chip_bytes", "hbm_limit_bytes", "flops_per_chip", "bytes_per_chip",
    "roofline_seconds", "mfu_bound", "collective_bytes", "compile_seconds", "mesh",
}  # fmt: skip
SMALL = {"model": "micro", "topology": "v5e:2x2", "context": 1024, "mesh": "auto"}
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512,
    "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


def asked(**keys: Any) -> PlanConfig:
    return read(SMALL | keys)


def folder_of(path: Path, **keys: Any) -> str:
    """A Hugging Face folder of a config alone."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY | keys))
    return str(path)


needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason="libtpu, the compiler for TPUs, is not installed",
)


@needs_compiler
def test_training_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search of a tiny model from its config alone, beyond the context it was made for; what
    was compiled once is not compiled again."""
    model = folder_of(tmp_path / "model")
    cache = str(tmp_path / "cache")
    cfg = asked(model=model, tokens_per_step=8192, compile=1, cache=cache)
    found = run(cfg, tmp_path / "run")
    assert found.keys() > KEYS
    assert found["fits"] is True
    assert 0 < found["hbm_per_chip_bytes"] < found["hbm_limit_bytes"] < 16 * 2**30
    assert found["flops_per_chip"] * 4 > found["model_flops"], "layers are computed again"
    assert 0 < found["mfu_bound"] < 1
    assert found["collective_bytes"] == sum(found["collectives"].values()) > 0
    assert found["bytes_per_chip"] > 0
    assert set(found["mesh"]) == {"slice", "data", "fsdp", "expert", "context", "tensor"}
    said = capsys.readouterr().err
    assert "beyond the 512 positions" in said.replace("\n", " ")
    assert "estimates" in said
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (len(kept["compiled"]), len(kept["estimates"])) == (1, 9)
    mesh = found["mesh"]
    again = run(asked(**vars(cfg) | {"mesh": mesh, "compile": None}), tmp_path / "again")
    assert {k: v for k, v in again.items() if k != "run_dir"} == {
        k: v for k, v in found.items() if k != "run_dir"
    }


@needs_compiler
def test_decoding_is_planned(tmp_path: Path) -> None:
    """A token costs one reading of weights and caches, and sums over heads and hidden units."""
    sides = {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 8192,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 65536,
    }  # fmt: skip
    model = folder_of(tmp_path / "model", **sides)
    mesh = {"data": 2, "tensor": 2}
    cfg = asked(model=model, what="decode", context=65536, slots=8, mesh=mesh)
    found = run(cfg, tmp_path / "run")
    assert found.keys() > KEYS
    assert found["fits"] is True
    layer = 512 * 128 * (8 + 2 * 2 + 8) + 3 * 512 * 2048
    read = 2 * (2 * layer + 512 * 8192) / 2  # bytes of bfloat16, over two ranks; no embedding
    cache = 2 * 2 * 65536 * 128 * (2 / 2) * (8 / 2) * 2  # a place reads those of its own slots
    assert 1 <= found["bytes_per_chip"] / (read + cache) < 1.5, "little is laid out anew"
    assert found["flops_per_chip"] == pytest.approx(found["model_flops"] / 4, rel=0.1)
    [summed] = [size for name, size in found["collectives"].items() if name == "psum tensor"]
    assert summed > 2 * 2 * 4 * 512 * 2 / 2, "of attention and feed-forward in every layer"
    assert found["limited_by"] == "HBM bandwidth"
    [guess] = json.loads((tmp_path / "run" / "plan.json").read_text())["estimates"]
    assert guess["roofline_seconds"] == pytest.approx(found["roofline_seconds"], rel=0.4)


@needs_compiler
def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    """Two tables of 12 GiB each, and their moments, on chips of 16."""
    model = folder_of(tmp_path / "model", vocab_size=2**21, hidden_size=1536)
    found = run(asked(model=model, topology="v5e:1x1", context=512), tmp_path / "run")
    assert found["fits"] is False
    assert found["hbm_per_chip_bytes"] > 2 * 12 * 2**30 > found["hbm_limit_bytes"]
    assert found["bytes_per_chip"] is None
    assert found["limited_by"].startswith("memory")
    assert found.keys() > KEYS


def test_memory_that_ran_out_is_read_off_the_compiler() -> None:
    said = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
    said += "space hbm. Used 25.50G of 15.75G hbm. Exceeded hbm capacity by 9.75G."
    assert out_of_memory(said) == 25.5 * 2**30
    other = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    other += "temporaries (2.00T) exceeds available HBM (95.74G)."
    assert out_of_memory(other) == 2 * 2**40
    assert out_of_memory("INTERNAL: used 25.50G of 15.75G hbm") is None
    assert out_of_memory("RESOURCE_EXHAUSTED: in vmem") is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model": "qwen9"}, "model='qwen9' is no folder.* and none of"),
        ({"model": "configs"}, "model='configs' is no folder with a config.json"),
        ({"topology": "v9:2x2"}, "topology='v9:2x2': chip 'v9'"),
        ({"what": "serve"}, "what='serve' must be one of train, decode"),
        ({"context": 1}, "context=1 must be at least 2"),
        ({"remat": "some"}, "remat='some' must be one of"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"tile": 200}, "tile=200 must divide by 128"),
        ({"tokens_per_step": 512}, "tokens_per_step=512 must be a multiple of context=1024"),
        ({"tokens_per_step": 2047}, "tokens_per_step=2047 must be a multiple of context=1024"),
        ({"slots": 8}, "slots=8 is for what=decode only"),
        (
            {"what": "decode", "tokens_per_step": 1024},
            "tokens_per_step=1024 is for what=train only",
        ),
        ({"what": "decode", "remat": "block"}, "remat=block is for what=train only"),
        ({"what": "decode", "tile": 128}, "tile=128 is for what=train only"),
        (
            {"what": "decode", "slots": 6, "mesh": {"fsdp": 4}},
            "slots=6 must be a multiple of the mesh's 4 places",
        ),
        ({"mesh": {"fsdp": 4}, "compile": 2}, "compile=2 is for mesh=auto only"),
        ({"mesh": "best"}, "mesh='best' must be auto or sizes"),
        ({"mesh": {"fsdp": 3}}, "mesh fsdp=3 has 3 devices .* has 4"),
        ({"mesh": {"rows": 4}}, "unknown key mesh.rows=4"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor=4 does not divide the model's kv_heads=2"),
        (
            {"model": "micro-moe", "topology": "v5e:4x4", "mesh": {"expert": 16}},
            "mesh.expert=16 does not divide the model's experts=8",
        ),
        ({"mesh": {"slice": 2, "fsdp": 2}}, "in 2 slices; .* has 4 in 1"),
    ],
)
def test_a_bad_key_is_named(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        run(asked(**keys), tmp_path)


def test_the_callers_mistakes_exit_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(main, "model=micro", "topology=v5e:2x2", "context=1024", "mesh={fsdp:3}")
    assert line.startswith("error: mesh fsdp=3 has 3 devices")


def test_all_meshes_are_sought_and_no_other() -> None:
    found = search.meshes(sizes("micro-moe"), parse("v5e:2x2"), asked(model="micro-moe"))
    assert len(set(found)) == len(found)
    shapes = {(m.data, m.fsdp, m.expert, m.context, m.tensor) for m in found}
    assert all(a * b * c * d * e == 4 for a, b, c, d, e in shapes)
    assert (1, 2, 2, 1, 1) in shapes
    dense = search.meshes(sizes("micro"), parse("v5e:2x2"), asked())
    assert {m.expert for m in dense} == {1}
    assert max(m.tensor for m in dense) == 2, "two key heads"
    assert MeshConfig(fsdp=4) in dense
    decode = asked(model="micro-moe", what="decode")
    assert search.meshes(sizes("micro-moe"), parse("v5e:2x2"), decode) == found
    two = asked(model="micro-moe", what="decode", slots=2)
    fewer = search.meshes(sizes("micro-moe"), parse("v5e:2x2"), two)
    assert fewer == [mesh for mesh in found if mesh.tensor > 1], "a slot or more for each place"


def test_a_dense_model_takes_what_the_trainer_takes() -> None:
    """Where there are no experts, "expert" cuts as "fsdp" does: allowed, though not sought."""
    dense, cfg = sizes("micro"), asked()
    search.check(MeshConfig(expert=4), dense, parse("v5e:2x2"), cfg)
    ranks.check(dense, vars(MeshConfig(expert=4)))
    with pytest.raises(UserError, match=r"mesh\.tensor=4 does not divide"):
        ranks.check(dense, vars(MeshConfig(tensor=4)))
