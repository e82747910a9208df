"""Ranks of a mesh have equal shares of the work, each token on one of them."""

import jax
import numpy as np
import pytest
from synthetic import agentic
from test_parallel import CFG, FORESTS, SAMPLES, on_mesh

from forge_jax.attention.plan import executed_pairs
from forge_jax.config import MeshConfig, PackConfig
from forge_jax.rl.context import deal
from forge_jax.rl.rows import Row, lay_out, rows
from forge_jax.sched.pack import micro_batches
from forge_jax.types import PackedTree


def real_forest(seed: int) -> PackedTree:
    """A group as agents make it: a long system prompt, rollouts of many turns."""
    samples = agentic(
        seed, 1000, rollouts=8, turns=20, system=700, observation=90, action=40, forget=20
    )
    [tree] = micro_batches(samples, "tree", PackConfig(budget=1 << 20))
    assert isinstance(tree, PackedTree)
    return tree


def loads(row: Row) -> np.ndarray:
    """(tokens, visible pairs, edges, pairs in the tiles visited) of each rank of a row."""
    places, ranks = row.batch.tokens.shape[:2]
    found = np.zeros((places, ranks, 4))
    for at in np.ndindex(places, ranks):
        batch = jax.tree.map(lambda x, at=at: x[at], row.batch)
        found[at] = (
            len(batch.tokens),
            # What is padding has depth 0, and so does the first token of all.
            (batch.depth + 1)[batch.depth > 0].sum(),
            (batch.occurrence_edge.max() + 1),
            executed_pairs(batch.plan),
        )
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_ranks_of_a_tree_have_equal_shares(seed: int, ranks: int) -> None:
    found = loads(lay_out([real_forest(seed)], ranks, CFG))
    assert np.all(found.max(axis=1) <= 1.05 * found.mean(axis=1))


def test_ranks_of_a_mesh_have_equal_shares_of_an_update() -> None:
    parts = [real_forest(seed) for seed in range(8)]
    assert len({part.n_tokens for part in parts}) > 1
    found = sum(loads(lay_out(members, 2, CFG)) for members in rows(parts, 4, CFG))
    assert np.all(found.max(axis=(0, 1)) <= 1.05 * found.mean(axis=(0, 1)))


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_every_chunk_is_dealt_once_and_each_rank_has_as_many(seed: int, kinds: int) -> None:
    load = np.random.default_rng(seed).random((24, kinds)) ** 4
    dealt = deal(load, 4)
    assert dealt.shape == (4, 6)
    assert np.array_equal(np.sort(dealt, axis=None), np.arange(24))
    assert np.all(np.diff(dealt, axis=1) > 0)


def test_a_tree_beyond_one_ranks_budget_is_one_micro_batch_of_all() -> None:
    samples, pack = FORESTS[1], PackConfig(budget=64, tile=16)
    [whole] = merged = micro_batches(samples, "tree", pack, mesh=MeshConfig(context=4))
    assert isinstance(whole, PackedTree)
    assert whole.n_tokens > pack.budget
    assert len(lay_out(merged, 4, on_mesh("float32")).batch.tokens[0, 0]) <= pack.budget


@pytest.mark.parametrize("places", [2, 3])
def test_every_place_of_the_data_axis_has_as_many_micro_batches(places: int) -> None:
    pack = PackConfig(budget=1024, tile=16)
    parts = micro_batches(SAMPLES, "tree", pack, mesh=MeshConfig(data=places))
    assert len(parts) % places == 0
