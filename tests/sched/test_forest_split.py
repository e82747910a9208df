"""Micro-batches obey the budget, and every occurrence is in one of them with its context."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.sched.cost import BY_TOKENS, CostModel
from forge_jax.sched.cut import BLOCK, SLACK, WORTH, Tree, ancestors, block_starts, trunk_of
from forge_jax.sched.merge import MODES, merge
from forge_jax.sched.split import divide, split
from forge_jax.types import CarriedTree, MicroBatch, PackedTree

SEEDS = range(6)


def paths(tree: PackedTree) -> list[tuple]:
    found: list[tuple] = []
    for i in range(tree.n_tokens):
        above = found[tree.parent[i]] if tree.parent[i] != i else ()
        found.append((*above, int(tree.tokens[i])))
        assert tree.depth[i] == len(above)
    return found


def occurrences(tree: PackedTree) -> Counter:
    """Every occurrence with the path that leads to it."""
    leads = paths(tree)
    columns = (tree.occurrence_sample, tree.occurrence_index, tree.old_logp, tree.advantage)
    return Counter(
        (
            leads[tree.edge_token[edge]],
            float(tree.edge_temperature[edge]),
            *(float(x[m]) for x in columns),
        )
        for m, edge in enumerate(tree.occurrence_edge)
    )


def whole(part: MicroBatch) -> PackedTree:
    return part.tree if isinstance(part, CarriedTree) else part


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [1, 9, 14, 25, 10_000])
@pytest.mark.parametrize("seed", SEEDS)
def test_splitting_loses_nothing_and_obeys_the_budget(seed: int, budget: int, mode: str) -> None:
    forest = merge(accidents(seed, vocab=4, temperatures=(1.0, 0.7)), mode)
    parts = split(forest, budget)
    trees = [whole(part) for part in parts]
    assert sum((occurrences(tree) for tree in trees), Counter()) == occurrences(forest)
    # A row that equals another one is a path of its own, hence sets.
    assert set().union(*map(paths, trees)) == set(paths(forest))
    for part, tree in zip(parts, trees, strict=True):
        index = np.arange(tree.n_tokens)
        sees = (index[None, :] <= index[:, None]) & (index[:, None] < tree.exit[None, :])
        assert sees.sum(axis=1).tolist() == (tree.depth + 1).tolist()
        assert (tree.exit > index).all()
        if isinstance(part, CarriedTree):
            assert np.diff(part.start, append=tree.n_tokens).tolist() == part.sizes.tolist()
            assert part.sizes.min() >= 1
            assert part.sizes.max() <= budget < tree.n_tokens
            assert part.start[0] == 0
            assert (tree.parent == index).sum() == 1
        else:
            assert tree.n_tokens <= budget


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_must_be_is_carried(seed: int) -> None:
    forest = merge(agentic(seed, vocab=100, rollouts=6, turns=3))
    longest = int(forest.depth.max()) + 1

    def carried(budget: int, cost: CostModel = BY_TOKENS) -> bool:
        return any(isinstance(part, CarriedTree) for part in split(forest, budget, cost))

    assert carried(longest - 1)
    assert not carried(longest, CostModel(edge=1.0))  # where copies cost nothing
    for budget in range(longest, 3 * longest, 7):
        cuts = Tree(forest, 0, forest.n_tokens, BY_TOKENS).cut(budget)
        assert cuts is not None
        starts = block_starts(forest.depth, forest.exit, budget)
        trunk = set().union(*(ancestors(forest, 0, start).tolist() for start in starts))
        assert trunk_of(forest.exit, starts).tolist() == sorted(trunk)
        saved = forest.depth[cuts].sum() - len(trunk) / 3
        assert carried(budget) == (saved > WORTH * forest.n_tokens)
        parts = split(forest, budget, carry=False)
        assert not any(isinstance(part, CarriedTree) for part in parts)


def test_blocks_begin_below_few_ancestors() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, [5] * 20 + [i] * 62, [0] * 81 + [1]) for i in range(4)]
    forest = merge(samples)
    # Leaves begin at 82, 144 and 206, below 20 ancestors: two blocks hold three leaves or two.
    assert block_starts(forest.depth, forest.exit, 200).tolist()[1] in (82, 144)
    path = np.arange(1000)
    alone = np.full(1000, 1000)
    assert block_starts(path, alone, 1000).tolist() == [0]
    assert block_starts(path, alone, 1).tolist() == path.tolist()
    starts = block_starts(path, alone, 256)
    assert len(starts) == 4
    assert np.diff(starts, append=1000).max() <= 256


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_the_best_of_all(seed: int) -> None:
    forest = merge(agentic(seed, vocab=100, rollouts=2, turns=1, system=4))
    budget = int(forest.depth.max()) // 2 + 2
    found = block_starts(forest.depth, forest.exit, budget)

    def price(starts: tuple[int, ...]) -> float:
        return sum(BLOCK * budget + forest.depth[s] / 3 for s in starts)

    n = forest.n_tokens
    every = [(0, *inner) for size in range(1, 4) for inner in combinations(range(1, n), size)]
    fit = [s for s in every if np.diff([*s, n]).max() <= budget]
    assert price(tuple(found.tolist())) == pytest.approx(min(map(price, fit)))


def divisions(leaves: int) -> Iterator[list[int]]:
    """First leaves of the pieces of every division into consecutive pieces."""
    for bits in range(1 << (leaves - 1)):
        yield [0, *(i for i in range(1, leaves) if bits >> (i - 1) & 1)]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("budget", [14, 18, 24])
@pytest.mark.parametrize("seed", range(8))
def test_a_cut_is_the_best_of_all(seed: int, budget: int, parts: int) -> None:
    samples = [s for s in accidents(seed, vocab=4) if len(s.tokens) <= budget]
    forest = merge([make_sample(np.random.default_rng(0), [9, *s.tokens], [0, *s.mask])
                    for s in samples if len(s.tokens) < budget])  # fmt: skip
    cost = CostModel(launch=2.0, token=1.0, area=0.1, edge=0.3)
    tree = Tree(forest, 0, forest.n_tokens, cost)
    found = tree.cut(budget, parts)
    ends = np.flatnonzero(forest.exit == np.arange(forest.n_tokens) + 1) + 1
    start = np.concatenate([[0], ends[:-1]])

    def price(division: list[int]) -> tuple[list[float], int, float]:
        """Cost of each piece by hand, the largest number of tokens, cost of the copies."""
        prices, most, copied = [], 0, 0.0
        for first, after in zip(division, [*division[1:], len(ends)], strict=True):
            own = set(range(start[first], ends[after - 1]))
            above = {a for t in own for a in ancestors(forest, 0, t).tolist()} - own
            depth = forest.depth[sorted(above)].astype(float)
            copied += len(above) + 0.1 * (depth + 1).sum()
            area = (forest.depth[sorted(own | above)] + 1.0).sum()
            edges = np.isin(forest.edge_token, sorted(own)).sum()
            prices.append(2 + len(own | above) + 0.1 * area + 0.3 * edges)
            most = max(most, len(own | above))
        return prices, most, copied

    every = [(d, *price(d)) for d in divisions(len(ends))]
    fit = [(d, p, c) for d, p, most, c in every if most <= budget]
    allowed = max(min(len(d) for d, _, _ in fit), parts)
    fit = [(d, p, c) for d, p, c in fit if len(d) <= allowed]
    makespan = min(max(p) for _, p, _ in fit)
    fewest = min(c for _, p, c in fit if max(p) - 2 <= SLACK * (makespan - 2) + 1e-6)
    [(_, prices, copied)] = [(d, p, c) for d, p, c in fit if start[d].tolist() == found.tolist()]
    assert copied == pytest.approx(fewest)
    assert tree.pieces(found) == pytest.approx(prices)
    assert tree.copies(found) == pytest.approx(copied)


def test_parts_are_as_few_and_as_even_as_the_trees_allow() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, np.full(10, i), [0] * 9 + [1]) for i in range(12)]
    for budget in (40, 50):
        assert [whole(p).n_tokens for p in split(merge(samples), budget)] == [40, 40, 40]


def test_a_wide_tree_is_cut_evenly() -> None:
    rng = np.random.default_rng(0)
    trunk = [7] * 10
    samples = [make_sample(rng, [*trunk, i, *range(9)], [0] * 19 + [1]) for i in range(8)]
    parts = split(merge(samples), 60, carry=False)
    assert [part.n_tokens for part in parts] == [50, 50]
    assert [part.n_occurrences for part in parts] == [4, 4]


def test_pieces_of_one_tree_share_their_copies() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, [5] * 4 + [i] * 6, [0] * 9 + [1]) for i in range(3)]
    forest = merge(samples)
    first, second = divide(forest, np.array([0, 10, 16]), np.array([1, 0, 0]))
    assert (first.n_tokens, second.n_tokens) == (4 + 12, 10)
    assert len(set(paths(first))) == first.n_tokens
    assert occurrences(first) + occurrences(second) == occurrences(forest)
