"""The closed form of an update beside what is counted of the program itself, traced."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import pytest

from experiments.planning import decode, estimate, programs, search
from experiments.planning.config import PlanConfig, read
from experiments.planning.counting import Known, Sent, Work, count
from experiments.planning.models import sizes
from experiments.planning.outcome import Job, compiled, guess
from experiments.planning.topology import devices, parse
from forge_jax.config import MeshConfig
from forge_jax.models.config import ModelConfig
from forge_jax.sharding import mesh_from

POD = parse("v5e:2x4")
DENSE = ModelConfig(
    vocab=4096, embed=512, layers=2, heads=8, kv_heads=4, head_dim=64, ffn=1024, rope_theta=1e4,
    tied=False, max_context=4096,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    DENSE, family="minimax_m2", qk_norm="layer", ffn=512, experts=16, experts_per_token=4,
    router="sigmoid", router_bias=True,
)  # fmt: skip


def plan(**keys) -> PlanConfig:
    given = {"model": "", "topology": "v5e:2x4", "context": 4096, "tile": 128, "remat": "block"}
    return PlanConfig(**given | keys)


def both(model: ModelConfig, cut: MeshConfig, cfg: PlanConfig) -> tuple[Work, Work]:
    """Of a row, by the closed form and counted."""
    mesh = mesh_from(cut, jax.devices())
    gradients = programs.train(model, mesh, cut, cfg, POD)[0]
    known = Known(mesh=dict(mesh.shape), live=gradients.live, taken=gradients.taken)
    rough = estimate.rough(model, mesh, cut, cfg, POD)
    return rough.programs[0][1], count(gradients.traced.jaxpr, known)


def large(sent: Mapping) -> dict:
    """Without what is less than a hundredth."""
    least = sum(sent.values()) / 100
    return {key: size for key, size in sent.items() if size > least}


@pytest.mark.parametrize(
    ("model", "mesh", "keys"),
    [
        (DENSE, MeshConfig(fsdp=4, context=2), {}),
        (DENSE, MeshConfig(data=2, fsdp=2, tensor=2), {}),
        (DENSE, MeshConfig(context=2, tensor=4), {"remat": "none"}),
        (DENSE, MeshConfig(fsdp=8), {"dtype": "float32"}),
        (EXPERTS, MeshConfig(fsdp=2, expert=4), {}),
        (EXPERTS, MeshConfig(expert=2, context=2, tensor=2), {}),
        (EXPERTS, MeshConfig(data=2, fsdp=4), {"remat": "none"}),
        (DENSE, MeshConfig(fsdp=4, context=2), {"remat": "attention"}),
    ],
)
def test_work_is_that_of_the_program(model: ModelConfig, mesh: MeshConfig, keys: dict) -> None:
    """FLOPs to 2 %, and every collective that matters to 5 %."""
    guessed, counted = both(model, mesh, plan(**keys))
    assert guessed.flops == pytest.approx(counted.flops, rel=0.02)
    assert guessed.passes == pytest.approx(counted.passes, rel=0.02)
    assert large(guessed.sent).keys() == large(counted.sent).keys()
    for key, size in large(counted.sent).items():
        assert guessed.sent[key] == pytest.approx(size, rel=0.05), key


def test_layers_count_as_often_as_there_are() -> None:
    """Of 2, 4 and 8 layers: the part of one layer, exactly."""
    counted = [
        both(dataclasses.replace(EXPERTS, layers=n), MeshConfig(fsdp=2, expert=4), plan())[1]
        for n in (2, 4, 8)
    ]
    two, four, eight = (work.flops for work in counted)
    assert eight - four == 2 * (four - two) > 0
    for key in counted[0].sent:
        two, four, eight = (work.sent[key] for work in counted)
        assert eight - four == pytest.approx(2 * (four - two), rel=1e-12), key


def test_model_flops_are_six_a_weight_and_token_and_twelve_a_pair() -> None:
    cfg = plan(tokens_per_step=3 * 4096)
    flops = estimate.model_flops(DENSE, cfg, POD)
    layer = 512 * 64 * (8 + 2 * 4 + 8) + 3 * 512 * 1024
    weights = 2 * layer + 512 * 4096
    pairs = 4096 * 4097 // 2
    assert estimate.active(DENSE) == weights
    assert flops == 3 * (6 * weights * 4096 + 12 * 2 * 8 * 64 * pairs)
    expert = 512 * 64 * (8 + 2 * 4 + 8) + 512 * 16 + 4 * 3 * 512 * 512
    assert estimate.active(EXPERTS) == 2 * expert + 512 * 4096
    assert math.isclose(estimate.active(EXPERTS), 2 * expert + 512 * 4096)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (DENSE, MeshConfig(data=2, fsdp=2, tensor=2)),
        (EXPERTS, MeshConfig(expert=4, tensor=2)),
    ],
    ids=["dense", "experts"],
)
def test_work_of_a_token_is_that_of_the_program(model: ModelConfig, mesh: MeshConfig) -> None:
    """As the compiler cuts it: FLOPs to 5 %, collectives between slots to 5 %, those over
    "tensor", some of which are the sampler's, to 30 %. No weight travels."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    cfg = PlanConfig(model="", topology="v5e:2x4", context=1024, what="decode", slots=16)
    job = Job(cfg=cfg, model=model, topology=POD, devices=tuple(devices(POD)))
    guessed = decode.rough(model, job.mesh(mesh), mesh, cfg, POD).programs[0][1]
    [found] = compiled(job, mesh, lambda said: None).found
    assert guessed.flops == pytest.approx(found.work.flops, rel=0.05)
    assert large(guessed.sent).keys() == large(found.work.sent).keys()
    for key, size in large(found.work.sent).items():
        assert not key.weights
        rel = 0.3 if key.axes == ("tensor",) else 0.05
        assert guessed.sent[key] == pytest.approx(size, rel=rel), key


def test_experts_cut_along_their_width_are_lent() -> None:
    """Three matrices of 16 experts in each of two layers, three quarters of each from others."""
    cut = MeshConfig(fsdp=4, tensor=2)
    cfg = PlanConfig(model="", topology="v5e:2x4", context=1024, what="decode", slots=16)
    guessed = decode.rough(EXPERTS, mesh_from(cut, jax.devices()), cut, cfg, POD).programs[0][1]
    lent = {key: size for key, size in guessed.sent.items() if key.weights}
    size = 2 * 3 * 16 * 512 * 512 // 2 * 2 * 3 / 4
    assert lent == {Sent("all_gather", ("fsdp",), True): size}


# What experiments.plan printed of programs that it compiled, for jax 0.10.2: model, topology,
# context, mesh; GiB of a chip, TB to and from its memory, seconds at least.
COMPILED = [
    ("qwen3-8b", "v5e:16x16", 65536, {"fsdp": 16, "context": 16}, 9.35, 1.003, 4.126),
    ("qwen3-32b", "v5p:8x8x8", 200000, {"fsdp": 32, "context": 16}, 30.87, 12.37, 41.42),
    (
        "minimax-m2",
        "v5p:8x8x8",
        200000,
        {"fsdp": 32, "context": 8, "tensor": 2},
        49.11,
        26.75,
        27.70,
    ),
]


@pytest.mark.parametrize(("model", "topology", "context", "mesh", "gib", "tb", "bound"), COMPILED)
def test_estimates_are_near_what_was_compiled(
    model: str, topology: str, context: int, mesh: dict, gib: float, tb: float, bound: float
) -> None:
    """Memory to 25 %, bytes moved to 40 %, and the bound to 10 %."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    keys = {"model": model, "topology": topology, "context": context}
    cfg, where = read(keys | {"mesh": mesh}), parse(topology)
    job = Job(cfg=cfg, model=sizes(model), topology=where, devices=tuple(devices(where)))
    assert cfg.mesh is not None
    found = guess(job, cfg.mesh)
    assert found.bytes / 2**30 == pytest.approx(gib, rel=0.25)
    assert found.seconds.hbm * where.chip.hbm_rate / 1e12 == pytest.approx(tb, rel=0.4)
    assert found.bound == pytest.approx(bound, rel=0.1)


# The same of a token, with 16 slots; TB to and from memory, seconds at least.
DECODED = ("qwen3-30b-a3b", "v5e:4x4", 16384, {"expert": 4, "tensor": 4}, 5.22, 0.00559, 0.00721)


def test_experts_are_decoded_where_they_are() -> None:
    """The estimate beside what was compiled, as above; and the search finds such a mesh."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    model, topology, context, mesh, gib, tb, bound = DECODED
    keys = {"model": model, "topology": topology, "context": context, "mesh": mesh}
    cfg, where = read(keys | {"what": "decode", "slots": 16}), parse(topology)
    job = Job(cfg=cfg, model=sizes(model), topology=where, devices=tuple(devices(where)))
    found = guess(job, MeshConfig(**mesh))
    assert found.bytes / 2**30 == pytest.approx(gib, rel=0.2)
    assert found.seconds.hbm * where.chip.hbm_rate / 1e12 == pytest.approx(tb, rel=0.4)
    assert found.bound == pytest.approx(bound, rel=0.1)
    meshes = search.meshes(job.model, where, cfg)
    best = search.ranked(meshes, lambda one: guess(job, one), lambda: None)[0]
    assert best.fits
    assert best.sizes.expert > 1
    assert best.bound <= found.bound
