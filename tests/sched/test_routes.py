"""Tokens whose routes differ are not one token; how many samples a token is of is never lost."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.config import PackConfig
from forge_jax.sched.blocks import block, lay_out
from forge_jax.sched.merge import MODES, merge
from forge_jax.sched.pack import micro_batches, pad
from forge_jax.sched.routes import digests
from forge_jax.sched.split import split
from forge_jax.types import NO_ROUTE, CarriedTree, Sample, route_dtype

SHAPE = (3, 2)  # layers, experts of a token


def routed(samples: list[Sample], experts: int, seed: int = 0, apart: float = 0.05) -> list[Sample]:
    """With a route for each token that is a function of its id, but for some tokens."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, experts, (64, *SHAPE)).astype(route_dtype(experts))
    found = []
    for sample in samples:
        routes = table[sample.tokens]
        odd = rng.random(len(routes)) < apart
        routes[odd, rng.integers(SHAPE[0])] = NO_ROUTE
        found.append(replace(sample, routes=routes))
    return found


def paths(tree, samples: list[Sample]) -> list[np.ndarray]:
    """The node of every token of each sample, by walking down the tree."""
    children: dict = {}
    for node, parent in enumerate(tree.parent[: tree.n_tokens].tolist()):
        children.setdefault(-1 if parent == node else parent, []).append(node)
    found = []
    for sample in samples:
        at, nodes = -1, []
        for t in range(len(sample.tokens)):
            [at] = [
                n
                for n in children[at]
                if tree.tokens[n] == sample.tokens[t]
                and np.array_equal(tree.routes[n], sample.routes[t])
            ]
            nodes.append(at)
        found.append(np.array(nodes))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_token_has_the_routes_of_every_sample_it_is_of(seed: int) -> None:
    samples = routed(accidents(seed, vocab=3), experts=200, seed=seed)
    tree = merge(samples)
    assert tree.routes.dtype == np.int16
    often = np.zeros(tree.n_tokens)
    for nodes in paths(tree, samples):  # each sample is spelled by exactly one path
        often[nodes] += 1
    np.testing.assert_array_equal(tree.multiplicity, often)
    same = [replace(s, routes=np.zeros_like(s.routes)) for s in samples]
    assert merge(same).n_tokens < tree.n_tokens, "nothing was kept apart"
    assert merge(same).n_tokens == merge([replace(s, routes=None) for s in samples]).n_tokens


def test_routes_apart_keep_all_that_follows_apart() -> None:
    one = Sample(
        tokens=np.arange(5, dtype=np.int32),
        mask=np.arange(5) > 2,
        old_logp=np.zeros(5, np.float32),
        advantage=np.zeros(5, np.float32),
        routes=np.ones((5, *SHAPE), np.int8),
    )
    other = replace(one, routes=one.routes.copy())
    other.routes[2, 1, 0] = 7
    assert merge([one, one]).n_tokens == 5
    assert merge([one, other]).n_tokens == 5 + 3
    assert merge([one, replace(one, routes=None)]).n_tokens == 2 * 5
    assert merge([one, replace(one, inputs=np.full(5, 4))]).n_tokens == 2 * 5
    with pytest.raises(ValueError, match="routes of different kinds"):
        merge([one, replace(one, routes=one.routes.astype(np.int16))])


def test_keys_differ_where_rows_do() -> None:
    rows = np.random.default_rng(0).integers(-1, 2, (4000, 3, 2)).astype(np.int8)
    _, first, inverse = np.unique(digests(rows), return_index=True, return_inverse=True)
    np.testing.assert_array_equal(rows[first][inverse], rows)
    assert len(first) == len(np.unique(rows.reshape(4000, -1), axis=0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_multiplicities_add_up_to_the_tokens_of_all_samples(mode: str, seed: int) -> None:
    """However a forest is divided: copies of ancestors count for the samples of their piece."""
    made = agentic(seed, vocab=60, rollouts=4, turns=4)
    first = made[0].tokens[:9]  # a sample that ends above the others, where pieces copy it
    made.append(make_sample(np.random.default_rng(0), first, np.arange(9) > 4))
    samples = routed(made, experts=40, apart=0)
    total = sum(len(s.tokens) for s in samples)
    forest = merge(samples, mode)
    assert forest.multiplicity.sum() == total
    padded = pad(forest, forest.n_tokens + 3, forest.n_edges + 1, forest.n_occurrences + 1)
    assert padded.multiplicity.sum() == total
    np.testing.assert_array_equal(padded.routes[-3:], np.full((3, *SHAPE), NO_ROUTE))
    for carry in (False, True):
        parts = split(forest, max(len(s.tokens) for s in samples) + 8, carry=carry)
        assert carry or len(parts) > 1, "nothing was divided"
        found = sum(
            float((p.tree if isinstance(p, CarriedTree) else p).multiplicity.sum()) for p in parts
        )
        assert found == total
        for part in parts:
            if not isinstance(part, CarriedTree):
                children = np.zeros(part.n_tokens)
                inner = part.parent != np.arange(part.n_tokens)
                np.add.at(children, part.parent[inner], part.multiplicity[inner])
                assert np.all(part.multiplicity >= children)
                assert np.all(part.multiplicity > 0)


def test_blocks_of_a_carried_tree_share_out_its_tokens() -> None:
    samples = routed(agentic(1, vocab=60, rollouts=1, turns=6), experts=40)
    longest = max(len(s.tokens) for s in samples)
    [tree] = micro_batches(samples, "tree", PackConfig(budget=longest // 2, tile=8))
    assert isinstance(tree, CarriedTree)
    blocks = lay_out(tree)
    made = [block(blocks, n) for n in range(blocks.number)]
    assert sum(b.multiplicity.sum() for b in made) == sum(len(s.tokens) for s in samples)
    for b in made:
        real = b.id < tree.tree.n_tokens
        np.testing.assert_array_equal(b.routes[real], tree.tree.routes[b.id[real]])
        assert np.all(b.routes[~real] == NO_ROUTE)
        assert not b.multiplicity[~real].any()
