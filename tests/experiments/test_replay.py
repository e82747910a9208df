"""The replay command: one loss whatever the merge, and the same as another implementation's."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from synthetic import accidents, agentic, make_sample

from experiments import replay
from experiments.replay import ReplayConfig
from forge_jax.config import MeshConfig, PackConfig, UserError, load
from forge_jax.sched.merge import MODES
from forge_jax.types import Sample

KEYS = {
    "loss", "grad_norm", "samples", "tokens_total", "tokens_unique", "tokens_computed",
    "trained_tokens", "tree_token_ratio", "attention_area", "attention_area_executed",
    "plan_seconds", "compile_seconds", "seconds_per_step", "tokens_per_second",
    "peak_rss_bytes", "merge", "attention", "device",
}  # fmt: skip
VOCAB = 1024  # of the micro preset
CAP = 1.2


def save(path: Path, samples: Sequence[Sample]) -> Path:
    def flat(name: str) -> np.ndarray:
        return np.concatenate([getattr(s, name) for s in samples])

    np.savez(
        path,
        tokens=flat("tokens"),
        lengths=np.array([len(s.tokens) for s in samples], np.int32),
        completion_mask=flat("mask").astype(np.uint8),
        old_logprobs=np.where(flat("mask"), flat("old_logp") - 3, 0).astype(np.float32),
        advantages=np.zeros(len(samples), np.float32),
        advantages_per_token=flat("advantage"),
    )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    save(folder / "w.npz", [*agentic(0, VOCAB), *accidents(0, VOCAB)])
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Result and dump of each mode."""
    found = {}
    for mode in MODES:
        cfg = ReplayConfig(
            workload=str(folder / "w.npz"),
            model="micro",
            merge=mode,
            steps=1,
            ratio_cap=CAP,
            dump=str(folder / f"{mode}.dump"),
            export=str(folder / "exported") if mode == "tree" else None,
            pack=PackConfig(budget=256, bucket_ratio=2.0),
        )
        result = replay.replay(cfg)
        found[mode] = result | {"dump": dict(np.load(folder / f"{mode}.dump"))}
    return found


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        error = np.linalg.norm(found[name].astype(np.float64) - value)
        assert error <= rtol * np.linalg.norm(value), (name, error)


@pytest.mark.parametrize("mode", ["none", "chain"])
def test_every_merge_gives_the_same_update(mode: str, runs: dict[str, dict[str, Any]]) -> None:
    found, tree = runs[mode], runs["tree"]
    assert set(found) == KEYS | {"dump"}
    assert found["loss"] == pytest.approx(tree["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(tree["grad_norm"], rel=1e-5)
    assert_same(found["dump"], tree["dump"], 1e-5)
    for name in ("samples", "tokens_total", "tokens_unique", "trained_tokens", "tree_token_ratio"):
        assert found[name] == tree[name]
    assert found["attention_area"] > tree["attention_area"]
    for run in (found, tree):
        assert run["attention_area"] <= run["attention_area_executed"]
        assert run["tokens_computed"] >= run["tokens_unique"]


@pytest.mark.slow
def test_a_mesh_gives_the_same_update(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    cfg = ReplayConfig(
        workload=str(folder / "w.npz"),
        model="micro",
        steps=1,
        ratio_cap=CAP,
        dump=str(folder / "mesh.dump"),
        pack=PackConfig(budget=128, tile=32, bucket_ratio=2.0),
        mesh=MeshConfig(data=2, context=2, tensor=2),
    )
    found, tree = replay.replay(cfg), runs["tree"]
    assert found["loss"] == pytest.approx(tree["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(tree["grad_norm"], rel=1e-5)
    assert_same(dict(np.load(folder / "mesh.dump")), tree["dump"], 1e-5)


def test_a_mesh_beyond_the_devices_is_refused(folder: Path) -> None:
    cfg = ReplayConfig(
        workload=str(folder / "w.npz"), model="micro", mesh=MeshConfig(data=3, context=4)
    )
    with pytest.raises(UserError, match="mesh data=3 context=4 needs 12 devices, found 8"):
        replay.replay(cfg)


def torch_update(exported: Path, workload: Path, dtype: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, log-probs and gradients from transformers and autograd, a sample at a time."""
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, dtype))
    w = dict(np.load(workload))
    starts = np.cumsum(w["lengths"]) - w["lengths"]
    loss, logprobs = 0.0, []
    for start, length in zip(starts, w["lengths"], strict=True):
        part = slice(start, start + length)
        tokens = torch.tensor(w["tokens"][part], dtype=torch.long)
        logits = model(tokens[None]).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        old, advantage, mask = (
            torch.tensor(w[name][part][1:]).to(logp.dtype)
            for name in ("old_logprobs", "advantages_per_token", "completion_mask")
        )
        ratio = (logp.detach() - old).exp().clamp(max=CAP)
        loss = loss - (ratio * advantage * logp * mask).sum() / int(w["completion_mask"].sum())
        logprobs.append(np.concatenate([[0.0], (logp * mask).detach().numpy()]))
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return loss.item(), grads | {"logprobs": np.concatenate(logprobs)}


def test_transformers_agree(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    tree = runs["tree"]
    loss, arrays = torch_update(folder / "exported", folder / "w.npz", "float32")
    assert tree["loss"] == pytest.approx(loss, rel=1e-4)
    norm = np.sqrt(sum(np.sum(g**2) for n, g in arrays.items() if n != "logprobs"))
    assert tree["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_same(tree["dump"], arrays, 1e-4)


def command(*overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.replay", *overrides],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def double(folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Result and dump of the command, in double precision."""
    done = command(
        f"workload={folder / 'w.npz'}", f"model={folder / 'exported'}", f"ratio_cap={CAP}",
        "steps=1", "dtype=float64", f"dump={folder / 'double.npz'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"dump": dict(np.load(folder / "double.npz"))}


def test_the_command_in_double_precision(
    double: dict[str, Any], runs: dict[str, dict[str, Any]]
) -> None:
    assert set(double) == KEYS | {"dump"}
    assert double["loss"] == pytest.approx(runs["tree"]["loss"], rel=1e-5)
    assert_same(double["dump"], runs["tree"]["dump"], 1e-5)


def test_transformers_agree_in_double_precision(folder: Path, double: dict[str, Any]) -> None:
    loss, arrays = torch_update(folder / "exported", folder / "w.npz", "float64")
    assert double["loss"] == pytest.approx(loss, rel=1e-6)
    assert_same(double["dump"], arrays, 1e-6)


MISTAKES = {
    ("workload", "absent.npz"): "workload=absent.npz",
    ("merge", "forest"): "merge='forest' must be one of tree, chain, none",
    ("model", "huge"): "model='huge'",
    ("steps", 0): "steps=0",
    ("dtype", "float16"): "dtype='float16'",
    ("attention", "flash"): "attention='flash'",
    ("remat", "all"): "remat='all'",
    ("ratio_cap", -1.0): "ratio_cap=-1.0",
    ("dump", "absent/d.npz"): "dump=absent/d.npz",
    ("export", "absent/e"): "export=absent/e",
    ("speed", 3): "unknown key speed=3",
}


@pytest.mark.parametrize(("key", "value"), MISTAKES)
def test_a_mistake_names_key_and_value(key: str, value: Any, folder: Path) -> None:
    mapping = {"workload": str(folder / "w.npz"), "model": "micro", key: value}
    with pytest.raises(UserError, match=re.escape(MISTAKES[key, value])):
        replay.replay(load(ReplayConfig, mapping))


def test_a_workload_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = save(tmp_path / "w.npz", [make_sample(rng, [1, 2], [0, 0])])
    with pytest.raises(UserError, match="no trained token"):
        replay.replay(ReplayConfig(workload=str(path), model="micro"))


def test_the_command_refuses_a_bad_sample_by_its_number(folder: Path) -> None:
    arrays = dict(np.load(folder / "w.npz"))
    start = int(arrays["lengths"][:4].sum())
    arrays["tokens"][start + 2] = VOCAB
    np.savez(folder / "bad.npz", **arrays)
    line = refused(replay.main, f"workload={folder / 'bad.npz'}", "model=micro")
    assert f"sample 4: tokens[2]={VOCAB}" in line


@pytest.mark.parametrize("override", ["speed=3", "+speed=3"])
def test_the_command_refuses_unknown_keys(override: str) -> None:
    assert "speed" in refused(replay.main, "workload=w.npz", "model=micro", override)


@pytest.mark.slow
@pytest.mark.parametrize("forget", [0, 12])
def test_merges_agree_at_length(forget: int, tmp_path: Path) -> None:
    samples = [
        # Of one sign, or the loss is a small rest of large terms, with few digits to compare.
        dataclasses.replace(sample, advantage=np.abs(sample.advantage))
        for sample in agentic(
            0, 1024, rollouts=3, turns=6, system=192, observation=24, action=16, forget=forget
        )
    ]
    cfg = ReplayConfig(workload=str(save(tmp_path / "w.npz", samples)), model="micro", steps=1)
    found = {}
    for mode in MODES:
        dump = str(tmp_path / f"{mode}.npz")
        found[mode] = replay.replay(dataclasses.replace(cfg, merge=mode, dump=dump))
    for mode in ("none", "chain"):
        assert found[mode]["loss"] == pytest.approx(found["tree"]["loss"], rel=1e-5)
        ours, tree = (dict(np.load(tmp_path / f"{m}.npz")) for m in (mode, "tree"))
        assert_same(ours, tree, 1e-5)
