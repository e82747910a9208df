"""Adapters and prediction modules on a mesh are those of one device."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from small_policy import MODEL
from synthetic import agentic
from test_parallel import EXPERTS
from test_step import assert_close, precision

from forge_jax.config import LoraConfig, MtpConfig
from forge_jax.models.layout import draw, init, layout
from forge_jax.models.lora import adapters_layout, described, merge, trained_of, tuned
from forge_jax.rl import parallel
from forge_jax.rl.step import StepConfig
from forge_jax.sched.merge import merge as merged_tree
from forge_jax.sched.pack import pad
from forge_jax.sharding import make_mesh, shardings
from forge_jax.trees import is_param
from forge_jax.types import PackedTree

MODULES = MtpConfig(weight=0.7, top_k=4, decay=0.5)
CFG = StepConfig(model=MODEL, ratio_cap=1.5, tile=16, attention="reference", dtype="float64")
EVEN = dataclasses.replace(MODEL, vocab=24)  # whose words are cut; 23 are not
ATTENTION = LoraConfig(rank=3, alpha=5.0, targets=("q", "k", "v", "o"))
CASES = {
    "modules": dataclasses.replace(
        CFG, model=dataclasses.replace(EVEN, mtp=2), mtp=MODULES, remat="block"
    ),
    "modules, words that ranks do not divide": dataclasses.replace(
        CFG, model=dataclasses.replace(MODEL, mtp=2), mtp=MODULES
    ),
    "modules, experts": dataclasses.replace(
        CFG, model=dataclasses.replace(EXPERTS, mtp=1), mtp=MODULES
    ),
    "adapters": dataclasses.replace(CFG, lora=LoraConfig(rank=3, alpha=5.0)),
    "adapters, experts": dataclasses.replace(CFG, model=EXPERTS, lora=ATTENTION, remat="block"),
}
DENSE_MESH = {"fsdp": 2, "context": 2, "tensor": 2}
EXPERT_MESH = {"expert": 2, "context": 2, "tensor": 2}


def trees() -> list[PackedTree]:
    return [pad(merged_tree(agentic(seed, MODEL.vocab)), 192, 192, 192) for seed in range(3)]


def parameters(cfg: StepConfig) -> Any:
    """Of a model, adapters beside it that are not 0."""
    params = init(cfg.model, jax.random.key(1), np.float64)
    if not cfg.lora.rank:
        return params
    pairs = jax.tree.map(
        lambda p: p._replace(std=0.2), adapters_layout(cfg.model, cfg.lora), is_leaf=is_param
    )
    return tuned(params, draw(pairs, jax.random.key(2), np.float64))


def computed(cfg: StepConfig, axes: dict[str, int]) -> Any:
    params = parameters(cfg)
    if axes:
        params = jax.device_put(
            params, shardings(described(cfg.model, cfg.lora), make_mesh(**axes))
        )
    found = parallel.gather(params, trees(), cfg)
    return jax.device_get({"grads": found.grads, "metrics": found.metrics.values()})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_computes_what_one_device_does(case: str) -> None:
    cfg = CASES[case]
    axes = EXPERT_MESH if cfg.model.experts else DENSE_MESH
    with precision("float64"):
        found, wanted = computed(cfg, axes), computed(cfg, {})
        assert_close(found, wanted, 1e-10)
    part = found["grads"]["mtp"] if cfg.mtp.weight else found["grads"]
    for path, gradient in jax.tree_util.tree_leaves_with_path(part):
        name = jax.tree_util.keystr(path)
        assert np.linalg.norm(gradient) > 1e-6 or "router_bias" in name, name


def test_adapters_are_merged_where_they_lie() -> None:
    lora, mesh = LoraConfig(rank=3), make_mesh(**DENSE_MESH)
    params = init(MODEL, jax.random.key(1))
    pairs = draw(
        jax.tree.map(lambda p: p._replace(std=0.2), adapters_layout(MODEL, lora), is_leaf=is_param),
        jax.random.key(2),
        np.float32,
    )
    pair = tuned(params, pairs)
    placed = jax.device_put(pair, shardings(described(MODEL, lora), mesh))
    made = merge(placed, lora)
    jax.tree.map(
        lambda x, s: np.testing.assert_equal(x.sharding, s), made, shardings(layout(MODEL), mesh)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), made, merge(pair, lora)
    )
    assert trained_of(placed) is placed.adapters
