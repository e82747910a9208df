"""Programs of the engine on a mesh sample what one device does, and weights stay in place."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from small_engine import SMALL

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout
from forge_jax.rollout import programs
from forge_jax.rollout.cache import empty_pool, pool_sharding
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
from forge_jax.sharding import automatic, make_mesh, mesh_of, replicated, shardings

SLOTS, PAGES = 8, 34
ROLLOUT = RolloutConfig(slots=SLOTS, context=16, page=4, chunk=64, decode_steps=4)
READ = PrefillShape(tokens=8, pages=4)
SAMPLE = DecodeShape(rows=SLOTS, shared=1, own=4, steps=4, drafts=0)
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}
# Every matrix of a layer is larger than whatever is computed of all tokens, logits too.
DENSE = dataclasses.replace(SMALL, vocab=128, embed=64, head_dim=16, layers=1)
EXPERTS = dataclasses.replace(DENSE, family="qwen3_moe", ffn=64, experts=8, experts_per_token=2)


def arrays(cfg: ModelConfig, axes: dict[str, int]) -> tuple[Any, Any, Any]:
    """Published weights, an empty pool and idle slots."""
    params = init(cfg, jax.random.key(0))
    if axes:
        where = jax.tree.map(automatic, shardings(layout(cfg), make_mesh(**axes)))
        params = jax.device_put(params, where)
    taken = programs.publish(params, cfg=cfg)
    where = pool_sharding(taken["embed"].sharding, cfg)
    pool = empty_pool(cfg, PAGES, ROLLOUT.page, np.float32, where)
    return taken, pool, jax.device_put(empty_slots(SLOTS), replicated(where))


def work(cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Packets that read eight sequences, the first page of all in common, and sample after them."""
    rng = np.random.default_rng(0)
    spans, rows, common = [], [], rng.integers(0, cfg.vocab, ROLLOUT.page)
    for slot in range(SLOTS):
        own = [2 + 4 * slot + i for i in range(4)]
        tokens = np.concatenate([common, rng.integers(0, cfg.vocab, 1 + slot % 4)]).astype(np.int32)
        spans.append(Span(slot=slot, start=0, tokens=tokens, table=[1, *own]))
        first = Fresh(token=slot, limit=9, seed=(0, slot), choice=0, temperature=1.0, stop_ids=())
        rows.append(DecodeRow(slot=slot, position=len(tokens), fresh=first, table=own))
    return pack_prefill(spans, READ, ROLLOUT), pack_decode(rows, [[1]], SAMPLE, ROLLOUT)


def sampled(cfg: ModelConfig, axes: dict[str, int]) -> tuple[np.ndarray, np.ndarray, str]:
    """What four steps sample, the experts of all tokens, and the program that decodes."""
    weights, pool, slots = arrays(cfg, axes)
    static = {"cfg": cfg, "routes": bool(cfg.experts), "mesh": mesh_of(weights)}
    read, sample = work(cfg)
    pool, _, before = programs.prefill(weights, pool, None, read, shape=READ, **static)
    lowered = programs.decode.lower(weights, pool, slots, None, sample, shape=SAMPLE, **static)
    decode = lowered.compile()
    pool, _, _, block = decode(weights, pool, slots, None, sample)
    assert pool[0][0].sharding.is_equivalent_to(pool_sharding(weights["embed"].sharding, cfg), 4)
    packet, routes, before = jax.device_get((block.packet, block.routes, before))
    if not cfg.experts:
        return packet, np.zeros(0), decode.as_text()
    real = np.arange(READ.tokens)[None] < read[:, 2:3]
    fed = np.concatenate([before[real], routes.reshape(-1, *routes.shape[-2:])])
    return packet, fed, decode.as_text()


def exchanged(program: str) -> list[int]:
    """Values of everything that ranks get of each other, in one array or in parts."""
    sent = r" = (.+?) (?:all-[\w-]+|collective-permute[\w-]*|reduce-scatter[\w-]*)\("
    return [
        sum(math.prod(map(int, shape.split(",") if shape else ())) for shape in shapes)
        for shapes in (re.findall(r"\w\[([\d,]*)\]", made) for made in re.findall(sent, program))
    ]


@pytest.mark.parametrize("cfg", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_weights_of_an_engine_stay_where_they_are(cfg: ModelConfig) -> None:
    tokens, routes, _ = sampled(cfg, {})
    found, same, program = sampled(cfg, MESH)
    np.testing.assert_array_equal(found[..., 0], tokens[..., 0])
    logp, wanted = (np.ascontiguousarray(x[..., 1]).view(np.float32) for x in (found, tokens))
    np.testing.assert_allclose(logp, wanted, atol=1e-4)
    np.testing.assert_array_equal(same, routes)
    ranks = MESH["tensor"]
    keys = cfg.embed * cfg.kv_heads * cfg.head_dim // ranks  # the least of a layer's matrices
    assert SLOTS * cfg.vocab // ranks < keys, "logits do travel"
    # A rank is lent the other half, along fsdp, of the three matrices of its own experts.
    own = cfg.experts // MESH["expert"] * cfg.embed * cfg.ffn // ranks
    large = [size for size in exchanged(program) if size >= keys]
    assert large == ([own] * 3 if cfg.experts else [])
