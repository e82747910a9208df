"""Merging is exact: against a trie of dicts, and undone token by token."""

import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.sched.merge import MODES, merge, unique_tokens
from forge_jax.types import PackedTree, Sample

SEEDS = range(12)


def path(tree: PackedTree, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    found = [node]
    while tree.parent[found[-1]] != found[-1]:
        found.append(int(tree.parent[found[-1]]))
    return found[::-1]


def trie(samples: list[Sample]) -> tuple[dict[tuple, set], dict[tuple, int]]:
    """Children and lowest sample of every prefix, by plain enumeration."""
    children: dict[tuple, set] = {(): set()}
    lowest: dict[tuple, int] = {}
    for i, sample in enumerate(samples):
        for end in range(1, len(sample.tokens) + 1):
            prefix = tuple(sample.tokens[:end].tolist())
            children.setdefault(prefix, set())
            children[prefix[:-1]].add(prefix)
            lowest.setdefault(prefix, i)
    return children, lowest


def depth_first(children: dict[tuple, set], lowest: dict[tuple, int]) -> list[tuple]:
    """Prefixes in the order of the forest: the most unique tokens below first."""

    def below(prefix: tuple) -> int:
        return 1 + sum(below(child) for child in children[prefix])

    def visit(prefix: tuple) -> list[tuple]:
        order = sorted(children[prefix], key=lambda child: (-below(child), lowest[child]))
        return [prefix] * bool(prefix) + [x for child in order for x in visit(child)]

    return visit(())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tree_is_the_trie_heaviest_child_first(seed: int) -> None:
    samples = accidents(seed, vocab=3)
    order = depth_first(*trie(samples))
    tree = merge(samples, "tree")
    spelled = [tuple(tree.tokens[path(tree, i)].tolist()) for i in range(tree.n_tokens)]
    assert spelled == order
    assert unique_tokens(samples) == tree.n_tokens == len(order)
    for i, prefix in enumerate(order):
        inside = [other[: len(prefix)] == prefix for other in order]
        assert tree.exit[i] == i + sum(inside)
        assert all(inside[i : tree.exit[i]])
        assert tree.depth[i] == len(prefix) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_unmerging_gives_every_sample_back(seed: int, mode: str) -> None:
    samples = accidents(seed, vocab=3, temperatures=(1.0, 0.7))
    tree = merge(samples, mode)
    start = np.cumsum([0] + [len(s.tokens) for s in samples])
    assert len(set(tree.occurrence_index.tolist())) == tree.n_occurrences
    assert tree.n_occurrences == sum(s.mask.sum() for s in samples)
    for m, edge in enumerate(tree.occurrence_edge):
        i = tree.occurrence_sample[m]
        sample, at = samples[i], tree.occurrence_index[m] - start[i]
        nodes = path(tree, int(tree.edge_token[edge]))
        assert tree.tokens[nodes].tolist() == sample.tokens[: at + 1].tolist()
        assert tree.depth[nodes].tolist() == list(range(at + 1))
        assert sample.mask[at]
        assert tree.old_logp[m] == sample.old_logp[at]
        assert tree.advantage[m] == sample.advantage[at]
        assert tree.edge_temperature[edge] == np.float32(sample.temperature)
        assert tree.weight[m] == 1
    pairs = list(zip(tree.edge_token.tolist(), tree.edge_temperature.tolist(), strict=True))
    assert len(set(pairs)) == tree.n_edges


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_sees_exactly_its_ancestors(seed: int, mode: str) -> None:
    tree = merge(accidents(seed, vocab=3), mode)
    index = np.arange(tree.n_tokens)
    sees = (index[None, :] <= index[:, None]) & (index[:, None] < tree.exit[None, :])
    for i in index:
        assert np.flatnonzero(sees[i]).tolist() == path(tree, int(i))


def chained(samples: list[Sample]) -> list[list[int]]:
    """Samples of each row, by trying every row for every sample."""
    rows: list[list[int]] = []
    for i, sample in enumerate(samples):
        trained = np.flatnonzero(sample.mask)
        context = sample.tokens[: trained[0] if len(trained) else len(sample.tokens)].tolist()
        best = None
        for row in rows:
            ends = samples[row[-1]].tokens.tolist()
            if ends == context[: len(ends)] and (
                best is None or len(ends) > len(samples[best[-1]].tokens)
            ):
                best = row
        if best is None:
            rows.append([i])
        else:
            best.append(i)
    return rows


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_is_extended_as_written(seed: int) -> None:
    samples = accidents(seed, vocab=3)
    rows = chained(samples)
    order = sorted(rows, key=lambda row: (-len(samples[row[-1]].tokens), row[0]))
    tree = merge(samples, "chain")
    assert tree.tokens.tolist() == [t for row in order for t in samples[row[-1]].tokens]
    root = np.cumsum(tree.parent == np.arange(tree.n_tokens)) - 1
    for m, edge in enumerate(tree.occurrence_edge):
        assert tree.occurrence_sample[m] in order[root[tree.edge_token[edge]]]


def test_turns_that_append_become_one_row() -> None:
    samples = agentic(0, vocab=50, rollouts=2, turns=4)
    rows = chained(samples)
    # The first rollout compacts once, so it needs two rows.
    assert sorted(len(row) for row in rows) == [2, 2, 4]
    tree = merge(samples, "chain")
    assert tree.n_tokens == sum(len(samples[row[-1]].tokens) for row in rows)
    assert tree.n_occurrences == sum(s.mask.sum() for s in samples)


def test_dropped_reasoning_leaves_chains_nothing_and_trees_much() -> None:
    samples = agentic(0, vocab=50, rollouts=2, turns=4, forget=3)
    total = sum(len(s.tokens) for s in samples)
    assert merge(samples, "chain").n_tokens == total
    assert merge(samples, "tree").n_tokens < total / 2


def test_a_row_is_extended_by_one_sample_only() -> None:
    rng = np.random.default_rng(0)
    first = make_sample(rng, [5, 6], [0, 1])
    branches = [make_sample(rng, [5, 6, t], [0, 0, 1]) for t in (7, 8)]
    tree = merge([first, *branches], "chain")
    assert tree.tokens.tolist() == [5, 6, 7, 5, 6, 8]
    assert tree.occurrence_sample[tree.edge_token[tree.occurrence_edge] < 3].tolist() == [0, 1]


def test_a_sample_joins_the_longest_row_then_the_lowest() -> None:
    rng = np.random.default_rng(0)
    short = make_sample(rng, [5, 6], [0, 1])
    long = [make_sample(rng, [5, 6, 7], [0, 1, 0]) for _ in range(2)]
    last = make_sample(rng, [5, 6, 7, 8], [0, 0, 0, 1])
    tree = merge([short, *long, last], "chain")
    assert tree.tokens.tolist() == [5, 6, 7, 8, 5, 6, 7, 5, 6]
    first_row = tree.edge_token[tree.occurrence_edge] < 4
    assert tree.occurrence_sample[first_row].tolist() == [1, 3]


def test_same_edge_under_two_temperatures_is_two_edges() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, [1, 2], [0, 1], t) for t in (1.0, 0.5, 1.0)]
    tree = merge(samples, "tree")
    assert tree.n_tokens == 2
    assert tree.edge_token.tolist() == [1, 1]
    assert tree.edge_temperature.tolist() == [0.5, 1.0]
    assert tree.occurrence_edge.tolist() == [1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_samples_without_a_trained_token_merge_too(mode: str) -> None:
    rng = np.random.default_rng(0)
    tree = merge([make_sample(rng, [4], [0]), make_sample(rng, [4, 4], [0, 0])], mode)
    assert (tree.n_edges, tree.n_occurrences) == (0, 0)
    assert tree.n_tokens == (3 if mode == "none" else 2)


def test_mistakes_are_named() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="no samples"):
        merge([])
    with pytest.raises(ValueError, match="mode='forest'"):
        merge([make_sample(rng, [1, 2], [0, 1])], "forest")
    with pytest.raises(ValueError, match=r"sample 1: temperature=0.0"):
        merge([make_sample(rng, [1, 2], [0, 1], t) for t in (1.0, 0.0)])
    merge([make_sample(rng, [1, 2], [0, 0], 0.0)])
