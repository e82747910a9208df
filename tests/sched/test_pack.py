"""Micro-batches hold every tree whole, within the budget, in few sizes."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.config import PackConfig
from forge_jax.sched.ladder import bucket
from forge_jax.sched.merge import MODES, merge
from forge_jax.sched.pack import micro_batches, pad
from forge_jax.types import CarriedTree, PackedTree

SEEDS = range(6)


def content(tree: PackedTree) -> Counter:
    """Every occurrence with the path that leads to it, and every path there is."""
    paths: list[tuple] = []
    for i in range(tree.n_tokens):
        above = paths[tree.parent[i]] if tree.parent[i] != i else ()
        paths.append((*above, int(tree.tokens[i])))
        assert tree.depth[i] == len(above)
    occurrences = [
        (
            paths[tree.edge_token[edge]],
            float(tree.edge_temperature[edge]),
            *(int(x[m]) for x in (tree.occurrence_sample, tree.occurrence_index)),
            *(float(x[m]) for x in (tree.old_logp, tree.advantage, tree.weight)),
        )
        for m, edge in enumerate(tree.occurrence_edge[: tree.n_occurrences])
    ]
    return Counter([*paths, *occurrences])


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_is_inert(seed: int) -> None:
    tree = merge(accidents(seed, vocab=4))
    padded = pad(tree, tree.n_tokens + 5, tree.n_edges + 3, tree.n_occurrences + 2)
    assert content(padded) == content(tree)
    n = tree.n_tokens
    alone = np.arange(n, n + 5)
    assert padded.parent[n:].tolist() == alone.tolist()
    assert padded.exit[n:].tolist() == (alone + 1).tolist()
    assert padded.weight[tree.n_occurrences :].tolist() == [0, 0]
    assert padded.occurrence_edge[tree.n_occurrences :].tolist() == [0, 0]
    assert padded.occurrence_index[tree.n_occurrences :].tolist() == [-1, -1]
    assert (padded.edge_temperature > 0).all()
    assert (padded.parent[padded.edge_token] != padded.edge_token).all()
    with pytest.raises(ValueError, match=f"n={n - 1}"):
        pad(tree, n - 1, tree.n_edges, tree.n_occurrences)


@pytest.mark.parametrize("ratio", [1.05, 1.25, 2.0])
def test_buckets_are_a_ladder(ratio: float) -> None:
    rungs = sorted({bucket(n, 100, ratio, 64) for n in range(1, 5000)})
    assert rungs[0] == 128
    assert all(rung % 64 == 0 for rung in rungs)
    for low, high in pairwise(rungs):
        assert high < low * ratio + 64
        assert bucket(low, 100, ratio, 64) == low
        assert bucket(low + 1, 100, ratio, 64) == high


def test_sizes_stop_at_the_budget() -> None:
    samples = [make_sample(np.random.default_rng(0), np.full(900, 1), [0] * 899 + [1])]
    [tree] = micro_batches(samples, "tree", PackConfig(budget=960))
    assert len(tree.tokens) == 960


@pytest.mark.parametrize("mode", MODES)
def test_many_batches_have_few_shapes(mode: str) -> None:
    cfg = PackConfig(bucket_ratio=2.0)
    shapes = set()
    for seed in range(100):
        samples = agentic(seed, vocab=100, rollouts=12, turns=3)
        for tree in micro_batches(samples, mode, cfg):
            shapes.add((len(tree.tokens), len(tree.edge_token), len(tree.weight)))
    assert len(shapes) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_a_fine_ladder_wastes_little_in_few_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        make_sample(rng, rng.integers(0, 9, n), [0] * (n - 1) + [1])
        for n in rng.integers(100, 4000, rng.integers(1, 40)).tolist()
    ]
    trees = micro_batches(samples, "tree", PackConfig(budget=8192, bucket_ratio=1.02))
    real = sum(tree.n_tokens for tree in trees)
    padded = sum(len(tree.tokens) for tree in trees)
    assert padded <= 1.025 * real or padded < real + 64 * len(trees)
    rungs = {bucket(n, 256, 1.02, 64) for n in range(1, 8193)}
    assert len(rungs) < 100
    assert {len(tree.tokens) for tree in trees} <= rungs | {8192}


def test_near_sizes_share_a_shape_where_that_is_cheap() -> None:
    rng = np.random.default_rng(0)

    def shapes(*lengths: int) -> list[tuple[int, int]]:
        samples = [make_sample(rng, np.full(n, n), [0] + [1] * (n - 1)) for n in lengths]
        trees = micro_batches(samples, "none", PackConfig(budget=max(lengths), bucket_ratio=1.02))
        return [(len(tree.tokens), len(tree.edge_token)) for tree in trees]

    assert len(set(shapes(6080, 6144, 6400))) == 2
    assert len(set(shapes(6080, 6144, 6208))) == 1
    assert len(set(shapes(6080, 4000, 3500))) == 3


def test_a_tree_beyond_the_budget_is_carried_in_blocks_of_a_rung() -> None:
    sample = make_sample(np.random.default_rng(0), np.arange(1000), [0] + [1] * 999)
    for budget, sizes in ((300, {256, 300}), (400, {256, 384, 400}), (999, {256, 999}), (10, {10})):
        [found] = micro_batches([sample], "tree", PackConfig(budget=budget, bucket_ratio=1.02))
        assert isinstance(found, CarriedTree)
        assert set(found.sizes.tolist()) <= sizes
        assert (found.sizes >= np.diff(found.start, append=1000)).all()


def test_no_samples_no_micro_batches() -> None:
    assert micro_batches([], "tree", PackConfig()) == []
