"""Micro-batches hold every tree whole, within the budget, in few sizes."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.config import PackConfig
from forge_jax.sched.merge import MODES, merge
from forge_jax.sched.pack import attention_area, bucket, micro_batches, pad, split
from forge_jax.types import PackedTree

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [10, 25, 10_000])
@pytest.mark.parametrize("seed", SEEDS)
def test_splitting_moves_trees_and_loses_nothing(seed: int, budget: int, mode: str) -> None:
    samples = accidents(seed, vocab=4, temperatures=(1.0, 0.7))
    forest = merge(samples, mode)
    parts = split(forest, budget)
    assert sum((content(part) for part in parts), Counter()) == content(forest)
    assert sum(map(attention_area, parts)) == attention_area(forest)
    for part in parts:
        roots = int((part.parent == np.arange(part.n_tokens)).sum())
        assert part.n_tokens <= budget or roots == 1
        index = np.arange(part.n_tokens)
        sees = (index[None, :] <= index[:, None]) & (index[:, None] < part.exit[None, :])
        assert sees.sum(axis=1).tolist() == (part.depth + 1).tolist()


def test_parts_are_as_few_and_as_even_as_the_trees_allow() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, np.full(10, i), [0] * 9 + [1]) for i in range(12)]
    parts = split(merge(samples), 40)
    assert [part.n_tokens for part in parts] == [40, 40, 40]
    parts = split(merge(samples), 50)
    assert [part.n_tokens for part in parts] == [40, 40, 40]


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


def test_no_samples_no_micro_batches() -> None:
    assert micro_batches([], "tree", PackConfig()) == []
