"""Programs of the engine on a mesh sample what one device does, and weights stay in place."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from small_engine import SMALL

from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout
from forge_jax.rollout import programs
from forge_jax.rollout.cache import cache_sharding, empty_cache
from forge_jax.rollout.packets import Row, pack_prefill
from forge_jax.sharding import automatic, make_mesh, mesh_of, replicated, shardings

SLOTS, CONTEXT = 8, 16
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}
# Every matrix of a layer is larger than whatever is computed of all tokens, logits too.
DENSE = dataclasses.replace(SMALL, vocab=128, embed=64, head_dim=16, layers=1)
EXPERTS = dataclasses.replace(DENSE, family="qwen3_moe", ffn=64, experts=8, experts_per_token=2)


def arrays(cfg: ModelConfig, axes: dict[str, int]) -> tuple[Any, Any, Any]:
    """Published weights, an empty cache and idle slots."""
    params = init(cfg, jax.random.key(0))
    if axes:
        where = jax.tree.map(automatic, shardings(layout(cfg), make_mesh(**axes)))
        params = jax.device_put(params, where)
    taken = programs.publish(params, cfg=cfg)
    where = cache_sharding(taken["embed"].sharding, cfg, SLOTS)
    cache = empty_cache(cfg, SLOTS, CONTEXT, np.float32, where)
    return taken, cache, jax.device_put(programs.empty_slots(SLOTS), replicated(where))


def sampled(cfg: ModelConfig, axes: dict[str, int]) -> tuple[np.ndarray, np.ndarray, str]:
    """What prefill and four steps of decoding sample, and the program that decodes."""
    weights, cache, slots = arrays(cfg, axes)
    mesh = mesh_of(weights)
    rng = np.random.default_rng(0)
    rows = [
        Row(
            prompt=rng.integers(0, cfg.vocab, 3 + n),
            limit=9,
            seed=(0, n),
            choice=0,
            temperature=1.0,
            stop_ids=(),
        )
        for n in range(SLOTS)
    ]
    packed = pack_prefill(list(enumerate(rows)), SLOTS, CONTEXT, SLOTS)
    cache, slots, first = programs.prefill(
        weights, cache, slots, packed, cfg=cfg, routes=bool(cfg.experts), mesh=mesh
    )
    decode = programs.decode.lower(
        weights, cache, slots, cfg=cfg, steps=4, routes=bool(cfg.experts), mesh=mesh
    ).compile()
    _, _, later = decode(weights, cache, slots)
    both = jax.device_get((first, later))
    tokens = np.concatenate([both[0].packet[None], both[1].packet])
    routes = [x.routes.reshape(-1, *x.routes.shape[-2:]) for x in both if cfg.experts]
    return tokens, np.concatenate(routes or [np.zeros(0)]), decode.as_text()


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
