"""Experts in the train step: a tree's loads, losses and gradients are those of its samples, and
what balances experts touches nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, packed
from synthetic import agentic

from forge_jax.config import MoeConfig, OptimConfig, PackConfig, TrainConfig, UserError, load
from forge_jax.models.layout import init, layout
from forge_jax.models.moe import Routing
from forge_jax.rl import balance, parallel
from forge_jax.rl.forward import StepConfig
from forge_jax.rl.state import create
from forge_jax.rl.step import Gathered, gather, update
from forge_jax.sched.merge import merge, unique_tokens
from forge_jax.sched.pack import micro_batches, pad
from forge_jax.sharding import make_mesh, shardings
from forge_jax.types import CarriedTree, Sample

EXPERTS = dataclasses.replace(
    MODEL, ffn=12, experts=6, experts_per_token=2, router="sigmoid", router_bias=True
)
AUX = MoeConfig(balance="aux", rate=0.5)
BIAS = MoeConfig(balance="bias", rate=0.01)
STEP = StepConfig(model=EXPERTS, tile=16)


def parameters(dtype: str = "float64") -> Any:
    params = init(EXPERTS, jax.random.key(1), jnp.dtype(dtype))
    bias = np.random.default_rng(0).normal(size=(2, 6)) * 0.1
    layers = {**params["layers"], "router_bias": jnp.asarray(bias, dtype)}
    return {**params, "layers": layers}


def samples(routed: bool) -> list[Sample]:
    """With `routed`, every fifth token of a sample is routed otherwise than in the others, and
    some tokens are not at all: what they share ends there."""
    rng = np.random.default_rng(0)
    made = agentic(3, vocab=EXPERTS.vocab, rollouts=3, turns=3, system=20)
    if not routed:
        return made
    half = np.array([0, 3])  # a token's two experts are of different halves
    table = rng.integers(0, 3, (EXPERTS.vocab, 2, 2)) + half
    found = []
    for number, sample in enumerate(made):
        routes = table[sample.tokens]
        routes[4 + number :: 5] = -1 if number % 2 else rng.integers(0, 3, (2, 2)) + half
        found.append(dataclasses.replace(sample, routes=routes.astype(np.int8)))
    return found


def gathered(of: list[Sample], mode: str, cfg: StepConfig) -> Gathered:
    """From one micro-batch, of one shape in every mode, so that little is compiled."""
    return gather(parameters(), [pad(merge(of, mode), 384, 64, 64)], cfg)


def assert_same(got: Gathered, want: Gathered) -> None:
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-10)
    np.testing.assert_allclose(got.metrics.load, want.metrics.load, rtol=1e-6)
    wanted = jax.tree_util.tree_leaves_with_path(want.grads)
    for (path, b), a in zip(wanted, jax.tree.leaves(got.grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=jax.tree_util.keystr(path))


def test_a_tree_is_its_samples() -> None:
    """In loss, auxiliary loss, load and every gradient: routed by the router, and by routes that
    split what has the same tokens."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(STEP, dtype="float64", moe=AUX)
        for routed in (False, True):
            of = samples(routed)
            tree, alone = (gathered(of, mode, cfg) for mode in ("tree", "none"))
            assert_same(tree, alone)
            assert routed == (unique_tokens(of) > unique_tokens(samples(False)))
            total = sum(len(s.tokens) for s in of)
            np.testing.assert_allclose(tree.metrics.load.sum(axis=-1), 2 * total)
            assert np.abs(tree.grads["layers"]["router"]).max() > 0
            assert not np.any(tree.grads["layers"]["router_bias"])


def test_a_carried_tree_is_a_whole_one() -> None:
    """Routes and multiplicities go along from block to block."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(STEP, dtype="float64")
        of = samples(routed=True)
        longest = max(len(s.tokens) for s in of)
        [carried] = micro_batches(of, "tree", PackConfig(budget=longest // 2, tile=cfg.tile))
        assert isinstance(carried, CarriedTree)
        assert_same(gather(parameters(), [carried], cfg), gathered(of, "tree", cfg))


def test_a_mesh_balances_and_replays_as_one_device_does() -> None:
    """Tokens of a micro-batch on several ranks, experts on several, and a place without work."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(STEP, dtype="float64", moe=AUX, attention="reference")
        mesh, params = make_mesh(data=2, expert=2, context=2), parameters()
        params = jax.device_put(params, shardings(layout(EXPERTS), mesh))
        of = samples(routed=True)
        trees = [pad(merge(part), 192, 64, 64) for part in (of[:3], of[3:6], of[6:])]
        assert_same(parallel.gather(params, trees, cfg), gather(parameters(), trees, cfg))


def test_the_auxiliary_loss_is_switchs() -> None:
    """``rate * X * Σ f_e P_e`` of each layer, by hand; the gradient is that of P alone."""
    rng = np.random.default_rng(0)
    load = jnp.asarray(rng.integers(1, 9, (2, 4)), jnp.float32)
    tokens = 7.0
    score = jnp.asarray(rng.dirichlet(np.ones(4), 2) * tokens, jnp.float32)
    weight, denominator = jnp.asarray([1.0, 1.0, 0.0, 1.0]), jnp.float32(12)

    def share(load: Any, score: Any) -> Any:
        routing = Routing(experts=jnp.zeros((2, 7, 2), jnp.int32), load=load, score=score)
        return balance.share_of_loss(routing, weight, denominator, 0.3)

    f, p = np.float64(load) / np.sum(load, axis=-1, keepdims=True), np.float64(score) / tokens
    want = 0.3 * 4 * np.sum(f * p) * 3 / 12
    value, (d_load, d_score) = jax.value_and_grad(share, argnums=(0, 1))(load, score)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert not d_load.any()
    np.testing.assert_allclose(d_score, 0.3 * 4 * f / tokens * 3 / 12, rtol=1e-5)
    even = share(jnp.full((2, 4), 5.0), jnp.full((2, 4), tokens / 4))
    np.testing.assert_allclose(even, 2 * 0.3 * 3 / 12, rtol=1e-5)  # the least there is


@pytest.mark.parametrize("moe", [MoeConfig(), BIAS], ids=["none", "bias"])
def test_biases_follow_the_load_and_nothing_else(moe: MoeConfig) -> None:
    """No optimiser touches them: no gradient, no moment, no decay."""
    optim = OptimConfig(learning_rate=0.05, weight_decay=0.5)
    cfg = dataclasses.replace(STEP, optim=optim, moe=moe)
    state = create(parameters("float32"), optim)
    parts = packed(samples(False), "tree")
    for _ in range(3):
        before = np.asarray(state.params["layers"]["router_bias"])
        router = np.asarray(state.params["layers"]["router"])
        counts = np.asarray(gather(state.params, parts, cfg).metrics.load)
        state, done = update(state, parts, cfg)
        step = np.sign(counts.mean(-1, keepdims=True) - counts) if moe == BIAS else 0
        np.testing.assert_allclose(
            state.params["layers"]["router_bias"], before + np.float32(0.01) * step, rtol=1e-6
        )
        assert np.abs(state.params["layers"]["router"] - router).max() > 0
        moments = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if path[-1] == jax.tree_util.DictKey("router_bias")
        ]
        assert len(moments) == 2
        assert not any(np.any(m) for m in moments)
        imbalance = np.mean(counts.max(-1) / counts.mean(-1))
        np.testing.assert_allclose(done.metrics["expert_load_max"], imbalance, rtol=1e-5)


def test_a_bias_evens_out_a_skewed_router() -> None:
    cfg = dataclasses.replace(
        STEP, optim=OptimConfig(learning_rate=1e-9), moe=MoeConfig(balance="bias", rate=0.02)
    )
    params = parameters("float32")
    skew = jnp.asarray([0.5, 0.3, 0, 0, -0.3, -0.5], jnp.float32)
    layers = {**params["layers"], "router_bias": params["layers"]["router_bias"] + skew[None]}
    state = create({**params, "layers": layers}, cfg.optim)
    parts, seen = packed(samples(False), "tree"), []
    for _ in range(40):
        state, done = update(state, parts, cfg)
        seen.append(done.metrics)
    assert seen[0]["expert_load_max"] > 2
    assert seen[0]["experts_idle"] > 0
    assert seen[-1]["expert_load_max"] < 1.4
    assert seen[-1]["experts_idle"] == 0
    assert seen[-1]["expert_load_entropy"] > max(0.97, seen[0]["expert_load_entropy"])


def test_measures_of_known_loads() -> None:
    found = balance.measures(np.array([[2.0, 2, 2, 2], [8, 0, 0, 0]]))
    assert found["expert_load_max"] == pytest.approx((1 + 4) / 2)
    assert found["experts_idle"] == pytest.approx(3 / 8)
    assert found["expert_load_entropy"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("model", "moe", "said"),
    [
        (MODEL, BIAS, r"moe\.balance=bias: the model has no experts"),
        (MODEL, AUX, r"moe\.balance=aux: the model has no experts"),
        (
            dataclasses.replace(EXPERTS, router_bias=False),
            BIAS,
            r"moe\.balance=bias: the model's routers have no bias",
        ),
    ],
)
def test_a_model_that_cannot_be_balanced_so_is_refused(model, moe, said) -> None:
    with pytest.raises(UserError, match=said):
        balance.check_model(moe, model)


@pytest.mark.parametrize(
    ("moe", "said"),
    [
        ({"balance": "loss"}, "balance=loss must be one of none, bias, aux"),
        ({"balance": "bias"}, r"rate=0\.0 must be > 0 where balance=bias"),
        ({"rate": 0.1}, r"rate=0\.1 must be 0 where balance=none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(moe, said) -> None:
    with pytest.raises(UserError, match=said):
        load(TrainConfig, {"model": "quick-moe", "task": "hop", "steps": 1, "moe": moe})
