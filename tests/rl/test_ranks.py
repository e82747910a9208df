"""What a rank is lent it gives back: no layer's weights are kept for the backward pass."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small_policy import MODEL, packed
from synthetic import agentic

from forge_jax.models.layout import layout
from forge_jax.models.remat import REMAT
from forge_jax.rl import parallel, ranks
from forge_jax.rl.forward import StepConfig, occurrences
from forge_jax.rl.rows import lay_out, rows
from forge_jax.sharding import PLACES, cuts, make_mesh, shardings
from forge_jax.trees import is_param

DENSE = dataclasses.replace(MODEL, ffn=20)  # no weight has as many values as there are tokens
EXPERTS = dataclasses.replace(
    MODEL, family="qwen3_moe", experts=4, experts_per_token=2, ffn=8, tied=True
)
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}


def kept_shapes(cfg: StepConfig) -> list[tuple[int, ...]]:
    """Shapes of what a rank keeps between the passes through the layers."""
    mesh = make_mesh(**MESH)
    [members] = rows(packed(agentic(0, MODEL.vocab), "tree"), 4, cfg)
    batch = lay_out(members, 1, cfg).batch
    found: list[tuple[int, ...]] = []

    def rank(params: Any, row: Any) -> jax.Array:
        own = jax.tree.map(lambda x: x[0, 0], row)

        def states(layers: Any) -> jax.Array:
            return occurrences({**params, "layers": layers}, own, cfg, mesh).h

        h, back = jax.vjp(states, params["layers"])
        found.extend(x.shape for x in jax.tree.leaves(back))
        return h

    def specified(x: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, np.float32 if is_param(x) else x.dtype, sharding=where)

    described = layout(cfg.model)
    params = jax.tree.map(specified, described, shardings(described, mesh), is_leaf=is_param)
    batch = jax.tree.map(lambda x: specified(x, NamedSharding(mesh, parallel.ROW)), batch)
    takes = (ranks.specs(cfg.model, mesh), parallel.ROW)
    jax.eval_shape(ranks.mapped(rank, mesh, takes, jax.P(PLACES)), params, batch)
    return found


def lent_sizes(cfg: StepConfig) -> set[int]:
    """Numbers of values of a layer's weights while they are whole but for tensor and expert."""
    mesh, sizes = make_mesh(**MESH), set()
    for param in layout(cfg.model)["layers"].values():
        held = [
            1 if logical in ("embed", "expert_embed") else math.prod(mesh.shape[a] for a in axes)
            for logical, axes in zip(param.axes, cuts(param, mesh), strict=True)
        ]
        if any(logical in ("embed", "expert_embed") for logical in param.axes):
            sizes.add(math.prod(param.shape[1:]) // math.prod(held[1:]))
    return sizes


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("remat", REMAT)
def test_no_lent_weight_is_kept(remat: str, model: Any) -> None:
    cfg = StepConfig(model=model, attention="reference", remat=remat)
    stacked = [shape for shape in kept_shapes(cfg) if shape[:1] == (model.layers,)]
    assert stacked
    assert not {math.prod(shape[1:]) for shape in stacked} & lent_sizes(cfg)


def test_policies_keep_less_and_less() -> None:
    kept = {
        remat: sum(
            math.prod(shape)
            for shape in kept_shapes(StepConfig(model=MODEL, attention="reference", remat=remat))
        )
        for remat in ("none", "attention", "block")
    }
    assert kept["block"] < kept["attention"] < kept["none"]
