"""Layers of experts inside a model: how tokens are routed, counted, and cut over ranks."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.collectives import UNCUT, Cut
from forge_jax.models import moe
from forge_jax.models.config import ModelConfig

CFG = ModelConfig(
    vocab=61,
    embed=24,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=16,
    rope_theta=10000.0,
    tied=False,
    max_context=64,
    experts=8,
    experts_per_token=3,
    router_bias=True,
    router="sigmoid",
)
SOFTMAX = dataclasses.replace(CFG, router="softmax", router_bias=False, norm_top=False)
T = 64
CUT_ALONG = {  # of each weight: (axis over experts, axis over hidden units)
    "router": (None, None),
    "router_bias": (None, None),
    "gate": (0, 2),
    "up": (0, 2),
    "down": (0, 1),
}


def problem(cfg: ModelConfig, dtype: Any = np.float64) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    e, f, x = cfg.embed, cfg.ffn, cfg.experts
    shapes = {"router": (e, x), "gate": (x, e, f), "up": (x, e, f), "down": (x, f, e)}
    layer = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    if cfg.router_bias:
        layer["router_bias"] = rng.normal(size=x).astype(dtype) / 4
    h, dy = rng.normal(size=(2, T, e)).astype(dtype)
    often = rng.integers(0, 4, T).astype(np.float32)
    given = rng.permuted(np.tile(np.arange(x), (T, 1)), axis=1)[:, : cfg.experts_per_token]
    routes = np.where(rng.random((T, 1)) < 0.5, given, -1)  # of some tokens only
    return layer, h, dy, often, routes


def objective(layer: Any, h: Any, dy: Any, often: Any, routes: Any, cfg: ModelConfig, cut: Cut):
    """A number that depends on all outputs, and the load."""
    y, routing = moe.feed_forward(h, layer, cfg, cut, routes, often)
    pull = jnp.cos(jnp.arange(cfg.experts))  # a linear function of the scores
    return jnp.sum(y * dy) + jnp.sum(routing.score * pull), (y, routing)


gradients = jax.jit(
    jax.value_and_grad(objective, argnums=(0, 1), has_aux=True), static_argnames=("cfg", "cut")
)


@pytest.mark.parametrize("cfg", [CFG, SOFTMAX], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize(("experts", "tensor"), [(8, 1), (1, 8), (2, 4)])
def test_cut_over_ranks_as_on_one_device(cfg, experts, tensor) -> None:
    """Experts over ranks with tokens of their own, hidden units over ranks with the same."""
    with jax.enable_x64(True):
        layer, h, dy, often, routes = problem(cfg)
        (_, (y, routing)), want = gradients(layer, h, dy, often, routes, cfg, UNCUT)

        cut = Cut(tensor=("t",) if tensor > 1 else (), expert=("x",) if experts > 1 else ())
        sides = {
            name: jax.P(
                *("x" if d == over_x else "t" if d == over_f else None for d in range(w.ndim))
            )
            for name, w in layer.items()
            for over_x, over_f in [CUT_ALONG[name]]
        }
        along = jax.P("x")

        def local(*args: Any) -> Any:
            (_, (y, routing)), (dlayer, dh) = jax.value_and_grad(
                partial(objective, cfg=cfg, cut=cut), argnums=(0, 1), has_aux=True
            )(*args)
            # What is whole on every rank has its gradient from the tokens of all ranks.
            for name in dlayer:
                if CUT_ALONG[name] == (None, None):
                    dlayer[name] = jax.lax.psum(dlayer[name], "x")
            return y, jax.lax.psum(routing.load, "x"), routing.experts, dlayer, dh

        mesh = jax.make_mesh((experts, tensor), ("x", "t"))
        with jax.set_mesh(mesh):
            spread = {name: jax.NamedSharding(mesh, side) for name, side in sides.items()}
            placed = jax.device_put(
                (layer, h, dy, often, routes), (spread, *[jax.NamedSharding(mesh, along)] * 4)
            )
            run = jax.shard_map(
                local, out_specs=(along, jax.P(), along, sides, along), check_vma=False
            )
            got = jax.jit(run)(*placed)
        wanted = (y, routing.load, routing.experts, *want)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=str(path))
        assert not np.any(want[0].get("router_bias", 0)), "the bias has no gradient"


def by_hand(layer: Any, h: np.ndarray, cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Experts, best first, and their weights, as papers have them (arXiv 2412.19437, eq. 12-16;
    2101.03961, eq. 1 and 2)."""
    z = h @ layer["router"]
    if cfg.router == "sigmoid":
        score = 1 / (1 + np.exp(-z))
    else:
        score = np.exp(z - z.max(-1, keepdims=True))
        score /= score.sum(-1, keepdims=True)
    experts = np.argsort(-(score + layer.get("router_bias", 0)), axis=-1)
    experts = experts[:, : cfg.experts_per_token]
    weight = np.take_along_axis(score, experts, -1)
    return experts, weight / weight.sum(-1, keepdims=True) if cfg.norm_top else weight


@pytest.mark.parametrize("cfg", [CFG, SOFTMAX], ids=["sigmoid", "softmax"])
def test_routes_as_the_papers_say(cfg) -> None:
    with jax.enable_x64(True):
        layer, h, *_ = problem(cfg)
        experts, weight = by_hand(layer, h, cfg)
        score, *got = moe.route(jnp.asarray(h), layer, cfg, None)
        assert score.shape == (T, cfg.experts)
        np.testing.assert_array_equal(got[0], experts)
        np.testing.assert_allclose(got[1], weight, rtol=1e-12)


def test_the_router_is_at_least_fp32() -> None:
    """A token in 16 bits is routed as its value is in 32: products are not rounded between."""
    layer, h, *_ = problem(CFG, np.float32)
    narrow = jnp.asarray(h, jnp.bfloat16)
    layer = {name: jnp.asarray(w, jnp.bfloat16) for name, w in layer.items()}
    got = moe.route(narrow, layer, CFG, None)
    assert got[0].dtype == got[2].dtype == jnp.float32
    exact = {name: np.float64(w) for name, w in layer.items()}
    np.testing.assert_array_equal(got[1], by_hand(exact, np.float64(narrow), CFG)[0])


def test_given_routes_are_used_with_the_routers_weights() -> None:
    with jax.enable_x64(True):
        layer, h, _, _, routes = problem(CFG)
        own, _ = by_hand(layer, h, CFG)
        score, experts, weight = moe.route(jnp.asarray(h), layer, CFG, routes)
        np.testing.assert_array_equal(experts, np.where(routes >= 0, routes, own))
        chosen = np.take_along_axis(np.asarray(score), np.asarray(experts), -1)
        np.testing.assert_allclose(weight, chosen / chosen.sum(-1, keepdims=True), rtol=1e-12)


def test_a_token_counts_as_often_as_it_occurs() -> None:
    layer, h, _, often, _ = jax.tree.map(jnp.asarray, problem(CFG, np.float32))
    _, counted = moe.feed_forward(h, layer, CFG, UNCUT, None, often)
    repeated = jnp.repeat(h, often.astype(int), axis=0)
    _, plain = moe.feed_forward(repeated, layer, CFG, UNCUT)
    np.testing.assert_allclose(counted.load, plain.load, rtol=1e-6)
    np.testing.assert_allclose(counted.score, plain.score, rtol=1e-5)
    assert counted.load.sum() == often.sum() * CFG.experts_per_token
    np.testing.assert_allclose(counted.score.sum(), often.sum(), rtol=1e-5)
