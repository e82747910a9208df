"""Ranks get as much to do as each other, by cost, and trees are cut only where that helps."""

import numpy as np
import pytest
from synthetic import agentic, make_sample
from test_forest_split import occurrences

from forge_jax.sched.assign import assign
from forge_jax.sched.cost import BY_TOKENS, CostModel, sizes_of
from forge_jax.sched.merge import merge
from forge_jax.sched.split import split
from forge_jax.types import PackedTree, Sample

COST = CostModel(token=1.0, area=0.01, edge=0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_the_dearest_rank_is_near_what_it_must_be(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(0, 1, rng.integers(1, 60))
    rank = assign(costs, ranks)
    load = np.bincount(rank, weights=costs, minlength=ranks)
    assert len(load) == ranks
    assert load.max() <= 4 / 3 * max(costs.max(), costs.sum() / ranks) + 1e-9
    assert (assign(costs, ranks) == rank).all()


def tree(seed: int, rollouts: int, system: int = 40) -> list[Sample]:
    return agentic(seed, 200, rollouts=rollouts, turns=3, system=system, observation=20, action=16)


def costs(parts: list) -> np.ndarray:
    assert all(isinstance(part, PackedTree) for part in parts)
    return COST.seconds(np.array([sizes_of(part, 64) for part in parts]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_one_tree_is_balanced_over_ranks(seed: int, ranks: int) -> None:
    forest = merge(tree(seed, rollouts=64))
    for budget in (10**6, 3000):
        parts = split(forest, budget, COST, ranks, carry=False)
        found = costs(parts)
        assert len(parts) % ranks == 0
        assert found.max() <= 1.05 * found.mean()
        assert max(part.n_tokens for part in parts) <= budget
        together = sum((occurrences(part) for part in parts), start=occurrences(parts[0]))
        assert together - occurrences(parts[0]) == occurrences(forest)


@pytest.mark.parametrize("seed", range(5))
def test_trees_that_balance_as_they_are_stay_whole(seed: int) -> None:
    samples = [s for i in range(8) for s in tree(10 * seed + i, rollouts=12)]
    forest = merge(samples)
    even = merge([make_sample(np.random.default_rng(0), np.full(50, i), [0] * 49 + [1])
                  for i in range(8)])  # fmt: skip
    parts = split(even, 100, COST, 4)
    assert sum(part.n_tokens for part in parts) == even.n_tokens
    found = costs(split(forest, 10**6, COST, 4))
    assert found.max() <= 1.05 * found.mean()


def test_what_cannot_be_cut_is_spread_as_well_as_it_goes() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, np.full(n, n), [0] * (n - 1) + [1]) for n in (90, 20, 10)]
    parts = split(merge(samples), 100, BY_TOKENS, 2)
    assert sorted(part.n_tokens for part in parts) == [30, 90]


def test_items_that_cost_nothing_are_spread_by_number() -> None:
    assert sorted(assign(np.zeros(6), 3).tolist()) == [0, 0, 1, 1, 2, 2]
    rng = np.random.default_rng(0)
    untrained = [make_sample(rng, np.full(60, n), [0] * 60) for n in range(5)]
    parts = split(merge(untrained), 100, CostModel(edge=1.0), 2)
    assert [part.n_tokens for part in parts] == [60] * 5
