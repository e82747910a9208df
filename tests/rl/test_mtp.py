"""Prediction modules on trees are those of the samples one by one, and learn from them alone."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_policy import MODEL, packed
from synthetic import accidents, agentic, make_sample
from test_step import assert_close, precision

from forge_jax.config import MtpConfig, OptimConfig, PackConfig, UserError
from forge_jax.models import layout, transformer
from forge_jax.models.layers import rms_norm, rotation
from forge_jax.rl import step
from forge_jax.rl.forward import occurrences, to_batch
from forge_jax.rl.state import create, policy_of
from forge_jax.rl.step import StepConfig
from forge_jax.rl.terms import share_of_modules
from forge_jax.sched.merge import MODES
from forge_jax.sched.pack import micro_batches
from forge_jax.types import CarriedTree, Sample

DEEP = dataclasses.replace(MODEL, mtp=2)
CFG = StepConfig(model=DEEP, mtp=MtpConfig(weight=0.7, top_k=4, decay=0.5))
EXACT = dataclasses.replace(CFG, dtype="float64", attention="reference")


def parameters(dtype: str) -> Any:
    """Weights whose norm scales are not 1."""
    params = layout.init(DEEP, jax.random.key(1), jnp.dtype(dtype))
    scales = params["mtp"] | {"block": None, "project": None}
    for name in ("token_norm", "state_norm", "norm"):
        draw = jax.random.normal(jax.random.key(len(name)), scales[name].shape, scales[name].dtype)
        params["mtp"][name] = 1 + 0.3 * draw
    return params


def divergence(p_logits: Any, q_logits: Any, k: int) -> tuple[Any, Any]:
    """KL with everything but the k likeliest words in one bucket, and α, of one edge."""
    p, q = jax.nn.softmax(p_logits), jax.nn.softmax(q_logits)
    best = jnp.argsort(-p)
    p, q = p[best], q[best]
    rest_p, rest_q = jnp.sum(p[k:]), jnp.sum(q[k:])
    kl = jnp.sum(p[:k] * jnp.log(p[:k] / q[:k]))
    kl += jnp.where(rest_p > 0, rest_p * jnp.log(rest_p / rest_q), 0) if k < len(p) else 0
    return kl, jnp.sum(jnp.minimum(p, q))


@partial(jax.jit, static_argnames=("cfg",))
def of_chain(params: Any, tokens: Any, mask: Any, temperature: Any, cfg: StepConfig) -> Any:
    """Loss of the modules at the trained tokens of one sample, by the sequence's own words:
    module k reads token t and the state before it, and guesses t + 1 as the policy does."""
    model, n = cfg.model, len(tokens)

    def attend(q: Any, k: Any, v: Any, cache: None) -> tuple[Any, None]:
        k, v = (jnp.repeat(x, model.heads // model.kv_heads, axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(model.head_dim)
        weights = jax.nn.softmax(jnp.where(np.tril(np.ones((1, n, n), bool)), scores, -1e30))
        return jnp.einsum("hts,shd->thd", weights, v), None

    h = transformer.hidden(params, tokens, jnp.arange(n), attend, model)[0]
    policy = jax.lax.stop_gradient(transformer.logits(params, h, model)) / temperature
    turned = rotation(jnp.arange(n), model, h.dtype)
    state = jax.lax.stop_gradient(h)
    total = 0.0
    for k in range(1, model.mtp + 1):
        weights = jax.tree.map(lambda x, k=k: x[k - 1], params["mtp"])
        before = jnp.concatenate([jnp.zeros((k, model.embed)), state[k - 1 : n - 1]])
        word = rms_norm(
            jax.lax.stop_gradient(params["embed"][tokens]), weights["token_norm"], model.norm_eps
        )
        before = rms_norm(before, weights["state_norm"], model.norm_eps)
        state = jnp.concatenate([word, before], axis=1) @ weights["project"]
        state, _ = transformer.block(state, weights["block"], None, turned, attend, model)
        normed = rms_norm(state, weights["norm"], model.norm_eps)
        guess = normed @ jax.lax.stop_gradient(params["unembed"]) / temperature
        kl, accepted = jax.vmap(partial(divergence, k=cfg.mtp.top_k))(policy, guess)
        share = jax.lax.stop_gradient(jnp.exp(-cfg.mtp.decay * accepted))
        loss = share * kl + (1 - share) * (1 - accepted)
        total += jnp.sum(loss[k:-1], where=mask[k + 1 :])
    return cfg.mtp.weight * total


def one_by_one(samples: Sequence[Sample]) -> tuple[float, Any]:
    """Loss and gradients of the modules, from each sample on its own."""
    length = max(len(s.tokens) for s in samples)
    loss, grads = 0.0, None
    for s in samples:
        tokens, mask = (np.pad(x, (0, length - len(x))) for x in (s.tokens, s.mask))
        found, more = jax.value_and_grad(of_chain)(
            parameters("float64"), tokens, mask, s.temperature, EXACT
        )
        loss += found
        grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
    trained = sum(s.mask.sum() for s in samples)
    return float(loss) / trained, jax.tree.map(lambda g: np.asarray(g) / trained, grads)


@partial(jax.jit, static_argnames=("cfg",))
def share(params: Any, batch: Any, denominator: Any, cfg: StepConfig) -> Any:
    """The modules' share of the loss of one micro-batch, and its gradient by everything."""

    def objective(params: Any) -> Any:
        guess = occurrences(params, batch, cfg).guess
        return share_of_modules(guess, batch, denominator, cfg)[0]

    return jax.value_and_grad(objective)(params)


def computed(samples: Sequence[Sample], mode: str, cfg: StepConfig, budget: int) -> Any:
    trees = packed(samples, mode, budget)
    trained = float(sum(tree.n_occurrences for tree in trees))
    parts = [share(parameters(cfg.dtype), to_batch(t, cfg), trained, cfg) for t in trees]
    return jax.device_get(jax.tree.map(lambda *x: sum(x), *parts))


@pytest.mark.parametrize("mode", MODES)
def test_modules_on_trees_are_those_of_the_samples_one_by_one(mode: str) -> None:
    samples = accidents(0, DEEP.vocab, temperatures=(1.0, 0.75))
    with precision("float64"):
        wanted, gradients = one_by_one(samples)
        cfg = dataclasses.replace(EXACT, remat="block")
        found, ours = computed(samples, mode, cfg, budget=32 if mode == "tree" else 192)
    assert wanted > 0.1
    assert found == pytest.approx(wanted, rel=1e-10)
    assert_close(ours["mtp"], gradients["mtp"], 1e-9)
    for name, gradient in jax.tree_util.tree_leaves_with_path(ours | {"mtp": {}}):
        assert not np.any(gradient), f"{name}: the modules move the policy"


def test_the_step_adds_the_modules_to_the_loss_and_tells_of_them() -> None:
    samples = agentic(0, DEEP.vocab)
    trees = packed(samples, "tree")
    with precision("float64"):
        params = parameters("float64")
        found = step.gather(params, trees, dataclasses.replace(EXACT, attention="xla"))
        alone = step.gather(params, trees, dataclasses.replace(EXACT, mtp=MtpConfig()))
        _, wanted = computed(samples, "tree", EXACT, budget=192)
        assert_close(found.grads["mtp"], wanted["mtp"], 1e-10)
        assert_close(policy_of(found.grads), policy_of(alone.grads), 1e-10)
        assert not any(np.any(x) for x in jax.tree.leaves(alone.grads["mtp"]))
    assert found.loss == pytest.approx(alone.loss, rel=1e-12)
    told = found.metrics.values()
    assert told.keys() - alone.metrics.values().keys() == {
        f"mtp_{name}_{k}" for name in ("kl", "accepted", "agrees") for k in (1, 2)
    }
    assert 0 < told["mtp_accepted_1"] < 1


def test_the_modules_do_not_move_the_policy_through_the_norm_that_clips() -> None:
    optim = OptimConfig(clip_norm=1e-3)
    params = {"embed": jnp.arange(3.0), "mtp": {"norm": jnp.ones(2)}}
    after = []
    for scale in (1.0, 100.0):
        grads = {"embed": jnp.ones(3), "mtp": {"norm": jnp.full(2, scale)}}
        state = create(jax.tree.map(jnp.copy, params), optim)
        assert step.norms(grads)[0] == pytest.approx(np.sqrt(3))
        state = step.apply(state, grads, optim)
        after.append(jax.device_get((state.params, state.opt_state)))
    jax.tree.map(np.testing.assert_array_equal, *after)
    moments = optax.tree.get(after[0][1], "mu")
    assert optax.tree.norm(moments["mtp"]) == pytest.approx(0.1 * optim.clip_norm)
    assert np.all(after[0][0]["mtp"]["norm"] < 1)


def learned(updates: int, rate: float, model: Any, rows: int = 8) -> tuple[Any, Any]:
    """Acceptance on text unseen of each module, before and after so many updates of modules
    beside a policy whose advantages are 0, so that it stays as it is."""
    cfg = StepConfig(
        model=model,
        mtp=MtpConfig(weight=1.0, top_k=8),
        optim=OptimConfig(learning_rate=rate, clip_norm=10.0),
        attention="reference",
    )
    rng = np.random.default_rng(0)

    def batch() -> list[Any]:
        texts = rng.integers(0, model.vocab, (rows, 24))
        samples = [make_sample(rng, text, [0] + [1] * 23) for text in texts]
        calm = [dataclasses.replace(s, advantage=np.zeros_like(s.advantage)) for s in samples]
        return packed(calm, "none")

    unseen = batch()
    state = create(layout.init(model, jax.random.key(0)), cfg.optim)
    policy = jax.device_get(policy_of(state.params))

    def accepted(params: Any) -> list[float]:
        told = step.gather(params, unseen, cfg).metrics.values()
        return [told["mtp_accepted_1"], told["mtp_accepted_2"]]

    before = accepted(state.params)
    for _ in range(updates):
        state, _ = step.update(state, batch(), cfg)
    jax.tree.map(np.testing.assert_array_equal, policy, jax.device_get(policy_of(state.params)))
    return before, accepted(state.params)


def test_modules_learn_what_the_policy_says() -> None:
    before, after = learned(200, 1e-2, dataclasses.replace(DEEP, init_std=0.5))
    for k, (untrained, trained) in enumerate(zip(before, after, strict=True), 1):
        print(f"\nmodule {k}: acceptance {untrained:.3f}, after 200 updates {trained:.3f}", end="")
    assert max(before) < 0.3
    assert min(after) > 2 * max(before)


def test_a_policy_takes_the_same_steps_to_the_bit_whether_modules_are_frozen() -> None:
    trees = packed(agentic(0, DEEP.vocab), "tree")
    ends, told = [], []
    for frozen in (False, True):
        mtp_cfg = dataclasses.replace(CFG.mtp, frozen=frozen)
        cfg = dataclasses.replace(CFG, mtp=mtp_cfg, attention="reference", dtype="float32")
        state = create(parameters("float32"), cfg.optim)
        for _ in range(3):
            state, done = step.update(state, trees, cfg)
            told.append(done.metrics)
        ends.append(jax.device_get(state.params))
    jax.tree.map(np.testing.assert_array_equal, policy_of(ends[0]), policy_of(ends[1]))
    began = parameters("float32")["mtp"]
    jax.tree.map(np.testing.assert_array_equal, ends[1]["mtp"], jax.device_get(began))
    assert told[0] == told[3]  # frozen modules are measured as well
    assert told[5]["mtp_kl_1"] != told[2]["mtp_kl_1"]


def test_modules_that_are_not_measured_are_not_frozen() -> None:
    with pytest.raises(ValueError, match=r"frozen=True measures modules, which weight=0"):
        MtpConfig(frozen=True)


def test_a_path_beyond_the_budget_is_refused_by_name() -> None:
    samples = agentic(0, DEEP.vocab)
    pack = PackConfig(budget=24, tile=8)
    parts = micro_batches(samples, "tree", pack, carry=False)
    assert any(isinstance(part, CarriedTree) for part in parts)
    with pytest.raises(UserError, match=r"mtp\.weight=0\.7: .* raise pack\.budget"):
        step.gather(parameters("float32"), parts, CFG)


def test_what_can_be_cut_is_not_carried() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, DEEP.vocab, 40).tolist()
    samples = [make_sample(rng, [*trunk, i], [0] * 40 + [1]) for i in range(DEEP.vocab)]
    pack = PackConfig(budget=44, tile=4)
    carried, cut = (micro_batches(samples, "tree", pack, carry=c) for c in (True, False))
    assert any(isinstance(part, CarriedTree) for part in carried)
    assert not any(isinstance(part, CarriedTree) for part in cut)
