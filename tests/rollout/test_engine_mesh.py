"""Programs of the engine on a mesh sample what one device does, and weights stay in place."""

import dataclasses
import math
import re
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small_engine import SMALL

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout
from forge_jax.rollout import programs
from forge_jax.rollout.access import places_of
from forge_jax.rollout.cache import beside, empty_pool, pool_sharding
from forge_jax.rollout.fitting import over_places
from forge_jax.rollout.packets import (
    DecodeRow,
    DecodeShape,
    Fresh,
    PrefillShape,
    Span,
    pack_decode,
    pack_prefill,
)
from forge_jax.rollout.slots import empty_slots
from forge_jax.sharding import automatic, make_mesh, mesh_of, shardings

SLOTS = 8
ROLLOUT = RolloutConfig(slots=SLOTS, context=16, page=4, chunk=64, decode_steps=4, pages=36)
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}
# Every matrix of a layer is larger than whatever is computed of all tokens, logits too.
DENSE = dataclasses.replace(SMALL, vocab=128, embed=64, head_dim=16, layers=1)
EXPERTS = dataclasses.replace(DENSE, family="qwen3_moe", ffn=64, experts=8, experts_per_token=2)


class Device:
    """Published weights, an empty pool and idle slots, on a mesh of some axes."""

    def __init__(self, cfg: ModelConfig, axes: dict[str, int], **options: Any):
        params, mesh = init(cfg, jax.random.key(0)), None
        if axes:
            mesh = make_mesh(**axes)
            where = jax.tree.map(automatic, shardings(layout(cfg), mesh))
            params = jax.device_put(params, where)
        self.rollout = over_places(dataclasses.replace(ROLLOUT, **options), places_of(mesh))
        self.weights = programs.publish(params, cfg=cfg)
        self.where = pool_sharding(self.weights["embed"].sharding, cfg, self.rollout.dealt)
        sizes = (self.rollout.pool_pages, ROLLOUT.page, np.float32, self.where)
        self.pool = empty_pool(cfg, *sizes)
        self.slots = jax.device_put(empty_slots(SLOTS), beside(self.where))
        self.static = {"cfg": cfg, "routes": bool(cfg.experts), "mesh": mesh_of(self.weights)}

    def work(self, vocab: int) -> tuple[PrefillShape, np.ndarray, DecodeShape, np.ndarray]:
        """Calls that read eight sequences, the first page of all in common, and sample after
        them; the first page is at every place."""
        rng, rollout = np.random.default_rng(0), self.rollout
        spans, rows, common = [], [], rng.integers(0, vocab, rollout.page)
        bundles: list[list[int]] = [[] for _ in range(SLOTS // rollout.bundle)]
        for slot in range(SLOTS):
            place, seat = divmod(slot, rollout.place_slots)
            shared, *own = (place * rollout.place_pages + i for i in (1, *range(2, 6)))
            own = [page + 4 * seat for page in own]
            own_tokens = rng.integers(0, vocab, 1 + slot % 4)
            tokens = np.concatenate([common, own_tokens]).astype(np.int32)
            spans.append(Span(slot=slot, start=0, tokens=tokens, table=[shared, *own]))
            first = Fresh(
                token=slot, limit=9, seed=(0, slot), choice=0, temperature=1.0, stop_ids=()
            )
            rows.append(DecodeRow(slot=slot, position=len(tokens), fresh=first, table=own))
            bundles[slot // rollout.bundle] = [shared]
        read = PrefillShape(tokens=8, pages=4, places=rollout.dealt)
        sample = DecodeShape(rows=SLOTS, shared=1, own=4, steps=4, drafts=0, places=rollout.dealt)
        packed = pack_decode(rows, bundles, sample, rollout)
        return read, pack_prefill(spans, read, rollout), sample, packed


class Result(NamedTuple):
    """What four steps sample, the experts of all tokens, and the program that decodes."""

    packet: np.ndarray
    fed: np.ndarray
    program: str


@cache
def sampled(cfg: ModelConfig, axes: tuple[tuple[str, int], ...], **options: Any) -> Result:
    device = Device(cfg, dict(axes), **options)
    pool, slots, static = device.pool, device.slots, device.static
    read, spans, sample, rows = device.work(cfg.vocab)
    pool, _, before = programs.prefill(device.weights, pool, None, spans, shape=read, **static)
    lowered = programs.decode.lower(device.weights, pool, slots, None, rows, shape=sample, **static)
    decode = lowered.compile()
    before_decode = jax.tree.map(lambda x: x.sharding, slots)
    pool, slots, _, block = decode(device.weights, pool, slots, None, rows)
    if device.rollout.dealt > 1:  # else the next call is compiled anew
        for array, where in zip(*map(jax.tree.leaves, (slots, before_decode)), strict=True):
            assert array.sharding.is_equivalent_to(where, array.ndim)
    for array in jax.tree.leaves(pool):
        assert array.sharding.is_equivalent_to(device.where, 4)
        held = {shard.data.shape[0] for shard in array.addressable_shards}
        assert held == {device.rollout.place_pages}, "a device has the pages of its place alone"
    packet, routes, before = jax.device_get((block.packet, block.routes, before))
    fed = np.zeros(0)
    if cfg.experts:
        used = spans[:, 0] < SLOTS
        real = np.arange(read.tokens)[None] < spans[used, 2:3]
        fed = np.concatenate([before[used][real], routes.reshape(-1, *routes.shape[-2:])])
    return Result(packet, fed, decode.as_text())


def made(kind: str, program: str) -> set[tuple[int, ...]]:
    """Shapes of what a device makes by operations of a kind."""
    found = re.findall(rf" = \w+\[([\d,]+)\]\S* {kind}\(", program)
    return {tuple(map(int, shape.split(","))) for shape in found}


def exchanged(program: str) -> list[int]:
    """Values of everything that ranks get of each other, in one array or in parts."""
    sent = r" = (.+?) (?:all-[\w-]+|collective-permute[\w-]*|reduce-scatter[\w-]*)\("
    return [
        sum(math.prod(map(int, shape.split(",") if shape else ())) for shape in shapes)
        for shapes in (re.findall(r"\w\[([\d,]*)\]", made) for made in re.findall(sent, program))
    ]


def assert_same(found: Result, wanted: Result) -> None:
    np.testing.assert_array_equal(found.packet[..., 0], wanted.packet[..., 0])
    logp, want = (np.ascontiguousarray(x.packet[..., 1]).view(np.float32) for x in (found, wanted))
    np.testing.assert_allclose(logp, want, atol=1e-4)
    np.testing.assert_array_equal(found.fed, wanted.fed)


@pytest.mark.parametrize("cfg", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_weights_of_an_engine_stay_where_they_are(cfg: ModelConfig) -> None:
    found = sampled(cfg, tuple(MESH.items()))
    assert_same(found, sampled(cfg, ()))
    ranks = MESH["tensor"]
    keys = cfg.embed * cfg.kv_heads * cfg.head_dim // ranks  # the least of a layer's matrices
    assert SLOTS * cfg.vocab // ranks < keys, "logits do travel"
    # A rank is lent the other half, along fsdp, of the three matrices of its own experts.
    own = cfg.experts // MESH["expert"] * cfg.embed * cfg.ffn // ranks
    large = [size for size in exchanged(found.program) if size >= keys]
    assert large == ([own] * 3 if cfg.experts else [])


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4}, {"data": 2, "tensor": 2}, {"slice": 2, "context": 2}]
)
def test_every_place_reads_its_own_pages(axes: dict[str, int]) -> None:
    assert_same(sampled(DENSE, tuple(axes.items())), sampled(DENSE, ()))


def test_a_place_gathers_and_attends_for_its_own_slots_alone() -> None:
    """A quarter of what every device does where all have all pages, with rollout.places=1."""
    axes, kv_heads, queries = (("fsdp", 4),), DENSE.kv_heads, DENSE.heads // DENSE.kv_heads
    whole, cut = sampled(DENSE, axes, places=1), sampled(DENSE, axes)
    assert_same(whole, cut)
    gathered, fewer = (max(map(math.prod, made("gather", x.program))) for x in (whole, cut))
    assert gathered == 4 * fewer == SLOTS * kv_heads * 16 * DENSE.head_dim
    for result, rows in ((whole, SLOTS), (cut, SLOTS // 4)):
        scores = {shape for shape in made("dot", result.program) if len(shape) == 4}
        assert scores == {(rows, kv_heads, queries, 16)}
