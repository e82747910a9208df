"""Runs that train a part of a model, adapters or prediction modules, and what becomes of them."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments.chaos import timeless
from experiments.export import ExportConfig, export
from experiments.models import resolve
from forge_jax.config import (
    EvalConfig,
    LoraConfig,
    MeshConfig,
    MoeConfig,
    MtpConfig,
    PackConfig,
    RolloutConfig,
    SchedConfig,
    TrainConfig,
    UserError,
    WarmConfig,
)
from forge_jax.models.hf import import_folder
from forge_jax.models.hf_lora import import_adapter
from forge_jax.models.layout import draw
from forge_jax.models.lora import adapters_layout, merge, tuned
from forge_jax.rl import run
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.report import read_rows
from forge_jax.rl.start import check_paths, prepared
from forge_jax.rl.state import create
from forge_jax.sharding import make_mesh, mesh_of
from forge_jax.trees import is_param

CFG = TrainConfig(
    model="quick",
    task="hop",
    steps=2,
    seed=5,
    attention="reference",
    checkpoint_every=1,
    warm=WarmConfig(steps=90, batch=16, gate=0.0),
    rollout=RolloutConfig(slots=16, context=64, decode_steps=4),
    sched=SchedConfig(group=5, batch=2, in_flight=2, window=0, synchronous=True),
    pack=PackConfig(bucket_ratio=2.0),
    eval=EvalConfig(episodes=4, concurrency=4),
    mtp=MtpConfig(depth=1, weight=0.3, top_k=8),
)


def played(cfg: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, without what may differ between two runs of one history."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(dataclasses.asdict(cfg)))
    run.train(cfg, resolve(cfg.model, cfg.seed), folder, {})
    rows = read_rows(folder / "metrics.jsonl")
    return [timeless(row) for row in rows]


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of updates that had something to train on, whose engine is the trainer's model."""
    stepped = [row for row in rows if row["stepped"]]
    assert stepped
    assert all(row["logp_gap_max"] < 1e-4 for row in stepped)
    return stepped


def exported(folder: Path, **options: Any) -> Any:
    export(ExportConfig(out=str(folder), **options))
    return import_folder(folder)


def same(x: Any, y: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.slow
def test_parts_are_trained_continued_served_and_exported(tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    assert all(0 < row["mtp_accepted_1"] < 1 for row in trained(played(CFG, grown)))
    base = resolve(str(grown))
    cfg, params = exported(tmp_path / "base", model=str(grown))
    assert (cfg.mtp, base.cfg.mtp) == (1, 1)
    same(params, base.params)

    lora = LoraConfig(rank=4, targets=("q", "v", "down"))
    warm = dataclasses.replace(CFG.warm, steps=3)
    tuning = dataclasses.replace(CFG, model=str(grown), lora=lora, mtp=MtpConfig(), warm=warm)
    folder, stopped = tmp_path / "tuned", tmp_path / "stopped"
    rows = played(tuning, folder)
    trained(rows)
    played(dataclasses.replace(tuning, steps=1), stopped)
    assert played(dataclasses.replace(tuning, resume=str(stopped)), stopped) == rows
    same(resolve(str(stopped)).params, resolve(str(folder)).params)
    found, adapters = import_adapter(folder / "adapter", base.cfg)
    assert found == lora
    merged = resolve(str(folder)).params
    assert np.any(merged["layers"]["q"] != base.params["layers"]["q"])
    same(merged, merge(tuned(base.params, adapters), lora))
    _, there = exported(tmp_path / "merged", model=str(folder))
    same(there, merged)
    options = {"model": str(grown), "adapter": str(folder / "adapter"), "dtype": "bfloat16"}
    _, half = exported(tmp_path / "half", **options)
    same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), merged))
    _, cut = exported(tmp_path / "cut", **options, mesh=MeshConfig(fsdp=2, tensor=2))
    same(cut, half)
    said = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(grown)


def test_parts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mtp\.weight=0\.5: quick has no .* mtp\.depth=1 adds"):
        prepared(dataclasses.replace(CFG, mtp=MtpConfig(weight=0.5)), resolve("quick"))
    with pytest.raises(ValueError, match=r"lora\.rank=2 .* mtp\.weight=0\.3"):
        dataclasses.replace(CFG, lora=LoraConfig(rank=2))
    moe = MoeConfig(balance="bias", rate=0.1)
    with pytest.raises(ValueError, match=r"lora\.rank=2 .* moe\.balance=bias"):
        dataclasses.replace(CFG, mtp=MtpConfig(), lora=LoraConfig(rank=2), moe=moe)
    short = PackConfig(budget=16)
    for cfg, key in (
        (dataclasses.replace(CFG, pack=short), "mtp.weight=0.3"),
        (
            dataclasses.replace(
                CFG,
                mtp=MtpConfig(),
                mesh=MeshConfig(context=3),
                pack=short,
                rollout=dataclasses.replace(CFG.rollout, slots=18),
            ),
            "mesh.context=3",
        ),
    ):
        with pytest.raises(UserError, match=r"rollout\.context=64.*pack\.budget=16 .*" + key):
            run.train(cfg, resolve("quick"), tmp_path, {})
    check_paths(dataclasses.replace(CFG, mesh=MeshConfig(context=4), pack=short))
    check_paths(dataclasses.replace(CFG, mtp=MtpConfig(), pack=short))
    with pytest.raises(UserError, match=r"out=.*/nowhere/x: no such folder"):
        export(ExportConfig(model="quick", out=str(tmp_path / "nowhere" / "x")))


def test_a_run_of_adapters_is_its_own_base_and_what_they_add(tmp_path: Path) -> None:
    """Without a run: its configuration and a checkpoint."""
    cfg = dataclasses.replace(CFG, mtp=MtpConfig(), lora=LoraConfig(rank=2, alpha=3.0))
    base = resolve("quick", cfg.seed)
    described = adapters_layout(base.cfg, cfg.lora)
    described = jax.tree.map(lambda p: p._replace(std=0.1), described, is_leaf=is_param)
    adapters = draw(described, jax.random.key(0), jnp.float32)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(dataclasses.asdict(cfg)))
    with closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(4, create(jax.tree.map(jnp.copy, adapters), cfg.optim), {})
    found = resolve(str(tmp_path), seed=99)
    assert (found.name, found.cfg) == ("quick-4", base.cfg)
    same(found.params, merge(tuned(base.params, adapters), cfg.lora))
    on_mesh = resolve(str(tmp_path), mesh=make_mesh(fsdp=2, tensor=2)).params
    assert mesh_of(on_mesh) is not None
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), on_mesh, found.params
    )
    more = OmegaConf.to_yaml(dataclasses.asdict(dataclasses.replace(cfg, lora=LoraConfig(rank=3))))
    (tmp_path / "config.yaml").write_text(more)
    with pytest.raises(UserError, match=r"layers\.down\.a is \(2, 160, 2\) there"):
        resolve(str(tmp_path))
