"""A tree computed block by block has the loss and every gradient of the whole."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import accidents, agentic, make_sample

from forge_jax.config import PackConfig
from forge_jax.rl import carry, step
from forge_jax.rl.costs import observe, prior
from forge_jax.rl.losses import cispo
from forge_jax.rl.step import StepConfig, Updated
from forge_jax.sched.blocks import block, lay_out
from forge_jax.sched.cost import Fit, sizes_of
from forge_jax.sched.merge import merge
from forge_jax.sched.pack import micro_batches
from forge_jax.types import CarriedTree, MicroBatch, PackedTree, Sample

CFG = StepConfig(model=MODEL, ratio_cap=1.5)
EXACT = dataclasses.replace(CFG, dtype="float64", attention="reference")


def precision(dtype: str) -> Any:
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


def branching(seed: int, length: int = 30, branches: int = 7) -> list[Sample]:
    """One tree of several levels, branches and leaves of any length, targets everywhere."""
    rng = np.random.default_rng(seed)
    paths = [rng.integers(0, MODEL.vocab, length).tolist()]
    for _ in range(branches):
        base = paths[rng.integers(len(paths))]
        at = rng.integers(1, len(base))
        paths.append([*base[:at], *rng.integers(0, MODEL.vocab, rng.integers(1, 12))])
    samples = []
    for path in [*paths, paths[-1]]:  # a duplicate too
        mask = rng.random(len(path)) < 0.7
        mask[0] = False
        samples.append(make_sample(rng, path, mask, float(rng.choice([1.0, 0.75]))))
    return samples


def in_blocks(tree: PackedTree, block: int) -> CarriedTree:
    start = np.arange(0, tree.n_tokens, block)
    return CarriedTree(tree=tree, start=start, sizes=np.full(len(start), block))


def carried(samples: Sequence[Sample], block: int) -> list[MicroBatch]:
    tree = merge(samples)
    assert (tree.parent == np.arange(tree.n_tokens)).sum() == 1
    return [in_blocks(tree, block)]


def computed(parts: Sequence[MicroBatch], samples: Sequence[Sample], cfg: StepConfig) -> Any:
    found = step.gather(parameters(cfg.dtype), parts, cfg)
    logp = step.scatter(found.logp, found.index, sum(len(s.tokens) for s in samples))
    metrics = found.metrics.values()
    return jax.device_get({"loss": found.loss, "logp": logp, "grads": found.grads} | metrics)


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    ours, theirs = (jax.tree_util.tree_leaves_with_path(x) for x in (found, wanted))
    for (name, x), (_, y) in zip(ours, theirs, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y)
        assert error <= tolerance * np.linalg.norm(y), (jax.tree_util.keystr(name), error)


def test_any_cut_beside_any_micro_batch_gives_the_whole() -> None:
    samples = branching(0, length=11, branches=4)
    others = accidents(1, MODEL.vocab)
    # The second tree has places of its own among the samples of the step.
    tree = merge(samples)
    beside = [
        dataclasses.replace(t, occurrence_index=np.where(
            t.weight > 0, t.occurrence_index + sum(len(s.tokens) for s in samples), -1
        ))
        for t in packed(others, "tree")
    ]  # fmt: skip
    everything = [*samples, *others]
    with precision("float64"):
        wanted = computed([*packed(samples, "tree"), *beside], everything, EXACT)
        parts = [in_blocks(tree, 6), *beside]
        assert_close(computed(parts, everything, EXACT), wanted, 1e-10)


def test_blocks_of_one_token() -> None:
    rng = np.random.default_rng(3)
    paths = ([1, 2, 3], [1, 2, 4], [1, 5, 6], [1], [1, 2, 3])
    samples = [make_sample(rng, path, [0, 1, 1][: len(path)]) for path in paths]
    [part] = carried(samples, 1)
    with precision("float64"):
        wanted = computed(packed(samples, "tree"), samples, EXACT)
        assert_close(computed([part], samples, EXACT), wanted, 1e-10)
        found = list(carry.logprobs(parameters("float64"), part, EXACT))
    index, logp = (np.concatenate(x) for x in zip(*found, strict=True))
    logp = step.scatter(logp[index >= 0], index[index >= 0], len(wanted["logp"]))
    np.testing.assert_allclose(logp, wanted["logp"], rtol=1e-10)


def test_single_and_half_precision_and_the_scan() -> None:
    samples = branching(4, length=80, branches=1)
    with precision("float64"):
        exact = computed(packed(samples, "tree"), samples, EXACT)
    found = computed(carried(samples, 64), samples, CFG)
    assert_close(found, exact, 1e-5)
    half = dataclasses.replace(CFG, dtype="bfloat16")
    errors = {}
    for name, parts in {"whole": packed(samples, "tree"), "cut": carried(samples, 64)}.items():
        grads = computed(parts, samples, half)["grads"]
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact["grads"]), strict=True)
        a, b = (np.concatenate([np.ravel(x) for x in part]) for part in zip(*pairs, strict=True))
        errors[name] = np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)
    assert errors["whole"] < 0.05
    assert errors["cut"] <= 1.1 * errors["whole"]


def test_long_trees_compile_a_few_times() -> None:
    """Steps of one model over twenty long trees: shapes are rungs of a few ladders."""
    traces = []

    def counted(seen: Any, cfg: Any, ratio_cap: float) -> Any:
        traces.append(seen.logp.shape)
        return cispo(seen, cfg, ratio_cap)

    cfg = dataclasses.replace(CFG, loss=counted)
    params = parameters()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(600, 3000, 4)
        samples = [
            make_sample(rng, np.full(n, i), np.arange(n) % 3 > 0) for i, n in enumerate(lengths)
        ]
        for part in micro_batches(samples, "tree", PackConfig(budget=512)):
            blocks = lay_out(part)
            for number in range(blocks.number):
                one, batch = carry.to_ready(block(blocks, number), cfg)
                context, own = (
                    np.zeros((2, MODEL.layers, len(x), MODEL.kv_heads, MODEL.head_dim), np.float32)
                    for x in (one.context, one.slot)
                )
                carry._gradients.eval_shape(params, batch, context, own, 1.0, cfg)
    # Blocks of 512 or of a rung or two below; for each, contexts of 1, 2, 4, 8 blocks.
    assert len(traces) <= 20


def test_steps_teach_what_they_cost() -> None:
    tree = packed(agentic(0, MODEL.vocab), "tree")
    part = in_blocks(merge(branching(0)), 16)
    fit = Fit(prior(MODEL))
    done = Updated(
        stepped=True,
        loss=0.0,
        grad_norm=1.0,
        metrics={},
        logp=np.zeros(0),
        index=np.zeros(0, np.int64),
        seconds=3.0,
    )
    observe(fit, tree, dataclasses.replace(done, stepped=False), CFG.tile)
    assert fit.model() == prior(MODEL)
    observe(fit, [*tree, part], done, CFG.tile)
    sizes = sum(sizes_of(t, CFG.tile) for t in [*tree, part.tree])
    assert fit.model().seconds(sizes) == pytest.approx(3.0, rel=0.01)
