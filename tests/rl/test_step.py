"""Loss and gradient of a step are those of the samples one by one, however they are computed."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import accidents, agentic, make_sample

from forge_jax.config import OptimConfig, PackConfig
from forge_jax.models import transformer
from forge_jax.rl import step
from forge_jax.rl.losses import cispo, negative_log_likelihood
from forge_jax.rl.state import create
from forge_jax.rl.step import StepConfig
from forge_jax.sched.merge import MODES
from forge_jax.sched.pack import micro_batches
from forge_jax.types import PackedTree, Sample

CFG = StepConfig(model=MODEL, ratio_cap=1.5)
WORKLOADS = {
    "accidents": lambda seed: accidents(seed, MODEL.vocab, temperatures=(1.0, 0.75)),
    "agentic": lambda seed: agentic(seed, MODEL.vocab),
    "reasoning": lambda seed: agentic(seed, MODEL.vocab, forget=3),
}


def precision(dtype: str) -> Any:
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


def total_length(samples: Sequence[Sample]) -> int:
    return sum(len(s.tokens) for s in samples)


def computed(
    trees: Sequence[PackedTree], samples: Sequence[Sample], cfg: StepConfig = CFG
) -> dict[str, Any]:
    """Loss, log-probs at their places and every gradient, as numpy."""
    found = step.gather(parameters(cfg.dtype), trees, cfg)
    logp = step.scatter(found.logp, found.index, total_length(samples))
    return jax.device_get({"loss": found.loss, "logp": logp, "grads": found.grads})


@jax.jit
def oracle(params: Any, rows: dict[str, jax.Array]) -> Any:
    """(loss, log-probs [S, T]) and gradients by plain causal attention over padded samples."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
        k, v = (jnp.repeat(x, MODEL.heads // MODEL.kv_heads, axis=-2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(MODEL.head_dim)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, v), cache

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        tokens, mask = rows["tokens"], rows["mask"]
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        h, _, _ = transformer.hidden(params, tokens, place, attend, MODEL)
        z = jax.nn.log_softmax(
            transformer.logits(params, h[:, :-1], MODEL) / rows["temperature"][:, None, None]
        )
        logp = jnp.take_along_axis(z, tokens[:, 1:, None], axis=2)[..., 0]
        logp = jnp.where(mask, jnp.pad(logp, ((0, 0), (1, 0))), 0.0)
        ratio = jax.lax.stop_gradient(jnp.minimum(jnp.exp(logp - rows["old_logp"]), CFG.ratio_cap))
        return -jnp.sum(ratio * rows["advantage"] * logp) / jnp.sum(mask), logp

    return jax.value_and_grad(loss, has_aux=True)(params)


def one_by_one(samples: Sequence[Sample]) -> dict[str, Any]:
    """What `computed` gives, from each sample on its own, in float64."""
    rows = {"temperature": np.ones(16)}
    rows["temperature"][: len(samples)] = [s.temperature for s in samples]
    for name in ("tokens", "mask", "old_logp", "advantage"):
        first = getattr(samples[0], name)
        rows[name] = np.zeros((16, 96), np.float64 if first.dtype.kind == "f" else first.dtype)
        for i, sample in enumerate(samples):
            rows[name][i, : len(sample.tokens)] = getattr(sample, name)
    (loss, logp), grads = jax.device_get(oracle(parameters("float64"), rows))
    flat = np.concatenate([row[: len(s.tokens)] for row, s in zip(logp, samples, strict=False)])
    return {"loss": loss, "logp": flat, "grads": grads}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    """Every array agrees to `tolerance` of its own norm, loss and each gradient by name."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(x) for x in (found, wanted))
    for (name, x), (_, y) in zip(ours, theirs, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y)
        assert error <= tolerance * np.linalg.norm(y), (jax.tree_util.keystr(name), error)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("seed", range(2))
def test_every_mode_is_one_by_one(seed: int, workload: str) -> None:
    samples = WORKLOADS[workload](seed)
    with precision("float64"):
        wanted = one_by_one(samples)
        exact = dataclasses.replace(CFG, dtype="float64")
        for mode in MODES:
            found = computed(packed(samples, mode), samples, exact)
            assert_close(found, wanted, 1e-10)
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    for mode in MODES:
        assert_close(computed(packed(samples, mode), samples), wanted, 1e-5)


VARIANTS = {
    "reference": {"attention": "reference"},
    "remat and tile": {"remat": "block", "tile": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_it_is_computed_does_not_matter(variant: str) -> None:
    samples = WORKLOADS["accidents"](3)
    cfg = dataclasses.replace(CFG, dtype="float64")
    with precision("float64"):
        trees = packed(samples, "tree")
        wanted = computed(trees, samples, cfg)
        found = computed(trees, samples, dataclasses.replace(cfg, **VARIANTS[variant]))
        assert_close(found, wanted, 1e-10)


def test_the_order_of_samples_does_not_matter() -> None:
    samples = WORKLOADS["reasoning"](5)
    order = np.random.default_rng(0).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    cfg = dataclasses.replace(CFG, dtype="float64")
    with precision("float64"):
        wanted = computed(packed(samples, "tree"), samples, cfg)
        found = computed(packed(shuffled, "tree"), shuffled, cfg)
    lengths = np.array([len(s.tokens) for s in samples])
    start = np.cumsum(lengths) - lengths
    wanted["logp"] = np.concatenate(
        [wanted["logp"][start[i] : start[i] + lengths[i]] for i in order]
    )
    assert_close(found, wanted, 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_the_cut_into_micro_batches_does_not_matter(mode: str) -> None:
    samples = WORKLOADS["accidents"](3)
    cfg = dataclasses.replace(CFG, dtype="float64")
    with precision("float64"):
        whole, parts = packed(samples, mode), packed(samples, mode, budget=32)
        assert len(parts) > len(whole)
        assert_close(computed(parts, samples, cfg), computed(whole, samples, cfg), 1e-10)


def test_bfloat16_layers_stay_near() -> None:
    samples = WORKLOADS["agentic"](0)
    with precision("float64"):
        exact = computed(
            packed(samples, "tree"), samples, dataclasses.replace(CFG, dtype="float64")
        )
    errors = {}
    for mode in ("none", "tree"):
        trees = packed(samples, mode)
        found = step.gather(
            parameters("float32"), trees, dataclasses.replace(CFG, dtype="bfloat16")
        )
        pairs = zip(jax.tree.leaves(found.grads), jax.tree.leaves(exact["grads"]), strict=True)
        flat = [(np.asarray(a, np.float64).ravel(), b.ravel()) for a, b in pairs]
        a, b = (np.concatenate(part) for part in zip(*flat, strict=True))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found.grads))
        errors[mode] = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert errors["none"] < 0.05
    assert errors["tree"] <= 1.25 * errors["none"]


def test_positions_are_depths_not_places() -> None:
    samples = WORKLOADS["agentic"](0)
    trees = packed(samples, "tree")
    placed = [dataclasses.replace(t, depth=np.arange(len(t.tokens), dtype=np.int32)) for t in trees]
    right, wrong = (computed(x, samples)["grads"] for x in (trees, placed))
    error, norm = (
        np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(x)))
        for x in (jax.tree.map(np.subtract, wrong, right), right)
    )
    assert error > 0.05 * norm


def test_samples_apart_in_the_tree_do_not_meet() -> None:
    rng = np.random.default_rng(0)
    left = make_sample(rng, [1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    logps = []
    for token in (6, 7):
        right = make_sample(rng, [1, 2, token, token, 9, 10], [0, 0, 0, 0, 1, 1])
        found = computed(packed([left, right], "tree"), [left, right])
        logps.append(found["logp"])
    np.testing.assert_array_equal(logps[0][:5], logps[1][:5])
    assert np.all(logps[0][-2:] != logps[1][-2:])


def test_logprobs_alone_are_those_of_the_gradient() -> None:
    samples = WORKLOADS["agentic"](1)
    [tree] = packed(samples, "tree")
    [(_, logp)] = step.logprobs(parameters("float32"), tree, CFG)
    found = step.gather(parameters("float32"), [tree], CFG)
    np.testing.assert_allclose(logp[: tree.n_occurrences], found.logp, rtol=1e-5)


def test_an_update_is_adamw_on_the_clipped_gradient() -> None:
    samples = WORKLOADS["agentic"](0)
    trees = packed(samples, "tree")
    optim = OptimConfig(learning_rate=0.1, warmup_steps=4, clip_norm=0.01, weight_decay=0.5)
    cfg = dataclasses.replace(CFG, optim=optim, loss=negative_log_likelihood, attention="reference")
    before = jax.device_get(parameters("float32"))
    grads = jax.device_get(step.gather(before, trees, cfg).grads)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in jax.tree.leaves(grads)))
    state, updated = step.update(create(parameters("float32"), optim), trees, cfg)
    assert updated.stepped
    assert int(state.step) == 1
    assert updated.seconds > 0
    assert updated.grad_norm == pytest.approx(norm, rel=1e-5)
    assert updated.loss == pytest.approx(-updated.logp.mean(), rel=1e-5)
    # The first step of Adam is the sign of the gradient, at a quarter of the rate.
    for p, g, after in zip(*map(jax.tree.leaves, (before, grads, state.params)), strict=True):
        sure = np.abs(g) > 1e-6 * norm
        expected = p - 0.1 / 4 * (np.sign(g) + 0.5 * p)
        np.testing.assert_allclose(after[sure], expected[sure], rtol=1e-4, atol=1e-5)


def test_a_batch_that_trains_nothing_does_not_step() -> None:
    rng = np.random.default_rng(0)
    nothing = packed([make_sample(rng, [1, 2], [0, 0])], "tree")
    state = create(parameters("float32"), CFG.optim)
    for trees in ([], nothing):
        after, updated = step.update(state, trees, CFG)
        assert after is state
        assert not updated.stepped
        assert updated.metrics == {}
    with pytest.raises(ValueError, match="no trained occurrence"):
        step.gather(state.params, nothing, CFG)


def test_an_untrained_micro_batch_counts_for_nothing() -> None:
    rng = np.random.default_rng(0)
    samples = WORKLOADS["agentic"](0)
    trees = packed(samples, "tree")
    nothing = packed([make_sample(rng, [1, 2], [0, 0])], "tree")
    assert_close(computed([*trees, *nothing], samples), computed(trees, samples), 1e-6)


def test_metrics_are_means_over_occurrences() -> None:
    samples = WORKLOADS["accidents"](4)
    trees = packed(samples, "none", budget=32)
    found = step.gather(parameters("float32"), trees, CFG)
    old = np.concatenate([s.old_logp for s in samples])[found.index].astype(np.float64)
    delta = found.logp - old
    ratio = np.exp(delta)
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_share": (ratio > CFG.ratio_cap).mean(),
        "logp_gap": np.abs(delta).mean(),
        "kl": (ratio - 1 - delta).mean(),
    }
    metrics = found.metrics.values()
    entropy = metrics.pop("entropy")
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert 0 < entropy < np.log(MODEL.vocab)


def test_many_batches_compile_a_few_times() -> None:
    traces = []

    def counted(seen: Any, cfg: Any, ratio_cap: float) -> Any:
        traces.append(seen.logp.shape)
        return cispo(seen, cfg, ratio_cap)

    cfg = dataclasses.replace(CFG, loss=counted)
    params = parameters("float32")
    for seed in range(40):
        samples = agentic(seed, MODEL.vocab, rollouts=12, turns=3)
        for tree in micro_batches(samples, "tree", PackConfig(bucket_ratio=2.0)):
            step.gradients.eval_shape(params, step.to_batch(tree, cfg), 1.0, cfg)
    assert len(traces) <= 4
