"""An update on a mesh is that of one device, whatever is cut over how many ranks."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, Sharding
from small_policy import MODEL, parameters
from synthetic import accidents, agentic
from test_step import assert_close, precision, total_length

from forge_jax.config import MeshConfig, PackConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout
from forge_jax.rl import parallel, step
from forge_jax.rl.forward import StepConfig
from forge_jax.rl.losses import cispo
from forge_jax.rl.rows import lay_out, rows
from forge_jax.sched.merge import merge
from forge_jax.sched.pack import micro_batches, pad
from forge_jax.sharding import make_mesh, shardings
from forge_jax.trees import is_param
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

# Words that ranks do not divide, and norms of each head; tied words and norms of all heads.
DENSE = MODEL
EXPERTS = dataclasses.replace(
    MODEL,
    family="minimax_m2",
    vocab=24,
    tied=True,
    qk_norm="layer",
    ffn=8,
    experts=8,
    experts_per_token=2,
    router="sigmoid",
    router_bias=True,
)
CFG = StepConfig(model=MODEL, ratio_cap=1.5, tile=64)
TILE = 16  # on meshes: other tiles than the reference has
SCAN = [{"data": 2, "context": 4}, {"data": 4, "context": 2}]
ONE_AXIS = [{name: 8} for name in ("fsdp", "expert", "context")] + [{"tensor": 2}]
MIXED = [{"fsdp": 2, "expert": 2, "tensor": 2}, {"slice": 2, "fsdp": 2, "context": 2}]
FORESTS = [
    accidents(3, MODEL.vocab, temperatures=(1.0, 0.75)),
    agentic(0, MODEL.vocab),
    agentic(1, MODEL.vocab, forget=3),
]
SAMPLES = [sample for forest in FORESTS for sample in forest]


@cache
def trees() -> list[PackedTree]:
    """A micro-batch for each forest, of one shape: three, for no number of places here."""
    made, before = [], 0
    for forest in FORESTS:
        tree = merge(forest)
        moved = dataclasses.replace(tree, occurrence_index=tree.occurrence_index + before)
        made.append(pad(moved, 192, 192, 192))
        before += total_length(forest)
    return made


def computed(cfg: StepConfig, axes: dict[str, int], batch: Sequence[MicroBatch]) -> dict[str, Any]:
    """Loss, log-probs at their places, metrics and every gradient, as numpy."""
    params = drawn(cfg)
    if axes:
        params = jax.device_put(params, shardings(layout(cfg.model), make_mesh(**axes)))
    found = parallel.gather(params, batch, cfg)
    logp = step.scatter(found.logp, found.index, total_length(SAMPLES))
    return {
        "loss": found.loss,
        "logp": logp,
        "metrics": found.metrics.values(),
        "grads": jax.device_get(found.grads),
    }


def drawn(cfg: StepConfig) -> Any:
    return init(cfg.model, jax.random.key(1), np.dtype(cfg.dtype))


@cache
def one_device(dtype: str, model: ModelConfig = DENSE) -> dict[str, Any]:
    return computed(dataclasses.replace(CFG, dtype=dtype, model=model), {}, trees())


def on_mesh(dtype: str, **changes: Any) -> StepConfig:
    return dataclasses.replace(CFG, dtype=dtype, tile=TILE, **changes)


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        pytest.param(model, axes, marks=() if axes in quick else pytest.mark.slow)
        for model, quick in (
            (DENSE, [{"fsdp": 8}, {"context": 8}, MIXED[1]]),
            (EXPERTS, [{"expert": 8}, {"tensor": 2}, MIXED[0]]),
        )
        for axes in [*ONE_AXIS, *MIXED]
    ],
    ids=lambda x: x.family if isinstance(x, ModelConfig) else str(x),
)
def test_a_mesh_computes_what_one_device_does(model: ModelConfig, axes: dict[str, int]) -> None:
    with precision("float64"):
        cfg = on_mesh("float64", model=model, attention="reference")
        assert_close(computed(cfg, axes, trees()), one_device("float64", model), 1e-12)


@pytest.mark.parametrize("axes", [SCAN[0], pytest.param(SCAN[1], marks=pytest.mark.slow)], ids=str)
def test_tiles_of_ranks_are_those_of_one_device(axes: dict[str, int]) -> None:
    with precision("float64"):
        assert_close(computed(on_mesh("float64"), axes, trees()), one_device("float64"), 1e-10)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_float32_on_a_mesh_is_as_near_as_on_one_device(model: ModelConfig) -> None:
    with precision("float64"):
        wanted = one_device("float64", model)
    assert_close(computed(on_mesh("float32", model=model), MIXED[1], trees()), wanted, 1e-5)


@pytest.mark.parametrize("remat", ["block", "attention", "offload"])
def test_what_is_kept_changes_nothing(remat: str) -> None:
    with precision("float64"):
        cfg = on_mesh("float64", model=EXPERTS, attention="reference", remat=remat)
        found = computed(cfg, MIXED[0], trees())
        assert_close(found, one_device("float64", EXPERTS), 1e-12)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"tensor": 4}, "mesh.tensor=4 does not divide the model's kv_heads=2"),
        ({"expert": 3}, "mesh.expert=3 does not divide the model's experts=8"),
    ],
)
def test_a_mesh_that_does_not_suit_the_model_is_refused(axes: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        computed(on_mesh("float32", model=EXPERTS), axes, trees())


def test_positions_are_depths_wherever_a_token_is_computed() -> None:
    placed = [
        dataclasses.replace(tree, depth=np.arange(len(tree.tokens), dtype=np.int32))
        for tree in trees()
    ]
    with precision("float64"):
        wrong, right = (
            computed(on_mesh("float64"), SCAN[0], x)["grads"] for x in (placed, trees())
        )
    error, norm = (
        np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(x)))
        for x in (jax.tree.map(np.subtract, wrong, right), right)
    )
    assert error > 0.05 * norm


def test_a_row_of_nothing_adds_nothing() -> None:
    few = trees()[:1]  # the other place of the mesh has no micro-batch at all
    with precision("float64"):
        found = computed(on_mesh("float64"), SCAN[0], few)
        wanted = computed(dataclasses.replace(CFG, dtype="float64"), {}, few)
    assert_close(found, wanted, 1e-10)


def specified(x: Any, where: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def test_many_batches_on_a_mesh_compile_a_few_times() -> None:
    traces = []

    def counted(seen: Any, cfg: Any, ratio_cap: float) -> Any:
        traces.append(seen.logp.shape)
        return cispo(seen, cfg, ratio_cap)

    cfg = dataclasses.replace(CFG, loss=counted, tile=16)
    mesh = make_mesh(**SCAN[0])
    where = shardings(layout(MODEL), mesh)
    params = jax.tree.map(specified, drawn(cfg), where)
    for seed in range(20):
        samples = agentic(seed, MODEL.vocab, rollouts=12, turns=3)
        pack = PackConfig(tile=16, budget=256, bucket_ratio=2.0)
        parts = micro_batches(samples, "tree", pack, mesh=MeshConfig(data=mesh.shape["data"]))
        for members in rows(parts, mesh.shape["data"], cfg):
            batch = lay_out(members, mesh.shape["context"], cfg).batch
            batch = jax.tree.map(lambda x: specified(x, NamedSharding(mesh, parallel.ROW)), batch)
            parallel.gradients.eval_shape(params, batch, 1.0, cfg, mesh)
    assert len(traces) <= 4


def carried() -> list[MicroBatch]:
    """One path of which no part fits: keys and values go from block to block."""
    parts = micro_batches(FORESTS[1], "tree", PackConfig(budget=16, tile=16))
    assert any(isinstance(part, CarriedTree) for part in parts)
    return parts


def test_carrying_keys_and_cutting_tokens_over_ranks_are_not_mixed_silently() -> None:
    params = jax.device_put(parameters(), shardings(layout(MODEL), make_mesh(context=2)))
    for attempt in (parallel.gather, lambda *args: list(parallel.logprobs(*args))):
        with pytest.raises(UserError, match=r"mesh.context=2: a tree of \d+ tokens"):
            attempt(params, carried(), CFG)


@pytest.mark.slow
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_keys_are_carried_where_tokens_are_not_cut(model: ModelConfig) -> None:
    """Every place computes the carried tree, and it counts once."""
    with precision("float64"):
        cfg = on_mesh("float64", model=model, attention="reference")
        wanted = computed(cfg, {}, micro_batches(FORESTS[1], "tree", PackConfig()))
        found = computed(cfg, {"data": 2, "expert": 2, "tensor": 2}, carried())
    assert_close(found, wanted, 1e-10)


@pytest.mark.slow
def test_bfloat16_on_ranks_is_as_near_as_on_one_device() -> None:
    with precision("float64"):
        exact = one_device("float64")["grads"]
    errors = []
    for axes, cfg in (({}, CFG), ({"context": 8}, on_mesh("float32"))):
        found = computed(dataclasses.replace(cfg, dtype="bfloat16"), axes, trees())["grads"]
        squares = jax.tree.map(lambda x, y: np.sum((x.astype(np.float64) - y) ** 2), found, exact)
        errors.append(np.sqrt(sum(jax.tree.leaves(squares))))
    assert errors[1] <= 1.1 * errors[0]


def test_logprobs_alone_are_those_of_the_gradient() -> None:
    with precision("float64"):
        wanted = one_device("float64")["logp"]
        where = shardings(layout(MODEL), make_mesh(**SCAN[1]))
        params = jax.device_put(parameters("float64"), where)
        found = np.zeros_like(wanted)
        cfg = dataclasses.replace(on_mesh("float64"), attention="reference")
        for index, logp in parallel.logprobs(params, trees(), cfg):
            found[index[index >= 0]] = np.asarray(logp)[index >= 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("axes", "remat"),
    [({"fsdp": 2, "context": 2}, "attention"), ({"context": 2, "tensor": 2}, "offload")],
    ids=str,
)
def test_compiles_for_tpus(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], remat: str
) -> None:
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    # Nothing is asked of a cloud, and other processes may compile at the same time.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    mesh = make_mesh(**axes, devices=devices)
    model = dataclasses.replace(MODEL, embed=128, head_dim=128)
    cfg = StepConfig(model=model, tile=128, attention="mosaic_tpu", dtype="bfloat16", remat=remat)
    [members] = rows([pad(merge(FORESTS[1]), 512, 512, 512)], axes.get("fsdp", 1), cfg)
    row = lay_out(members, axes["context"], cfg)
    params = jax.tree.map(
        lambda p, where: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=where),
        layout(model),
        shardings(layout(model), mesh),
        is_leaf=is_param,
    )
    batch = jax.tree.map(lambda x: specified(x, NamedSharding(mesh, parallel.ROW)), row.batch)
    compiled = parallel.gradients.lower(params, batch, 1.0, cfg, mesh).compile()
    program = compiled.as_text()
    kernels = program.count('custom_call_target="tpu_custom_call"')
    # Forward, and backward for queries and for keys: attention itself is not run again.
    assert kernels == 3 if remat == "attention" else kernels > 3
    assert "reduce-scatter" in program  # of the gradients of keys and values
    on_host = compiled.memory_analysis().host_temp_size_in_bytes
    assert (on_host > 0) == (remat == "offload")
