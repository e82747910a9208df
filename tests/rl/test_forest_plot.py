"""What the pictures of a forest are made of, and that they are drawn from any forest."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from synthetic import accidents, agentic, make_sample

from forge_jax.attention.plan import tree_plan
from forge_jax.rl.forest_plot import (
    DEAD,
    FULL,
    blocks,
    draw_forest_and_tiles,
    sharing,
    tile_kinds,
    trained,
    visible,
)
from forge_jax.sched.merge import merge


def test_every_token_knows_how_many_samples_train_below_it() -> None:
    rng = np.random.default_rng(0)
    paths = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6], [7, 8, 9], [7, 8, 9, 0]]
    samples = [make_sample(rng, path, np.arange(len(path)) == len(path) - 1) for path in paths]
    tree = merge(samples)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    shared = sharing(tree)
    assert shared.tolist() == [4, 3, 2, 1, 1, 1, 2, 2, 2, 1]
    start, stop = blocks(tree, shared)
    found = list(zip(start.tolist(), stop.tolist(), strict=True))
    assert found == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 9), (9, 10)]
    assert np.flatnonzero(trained(tree)).tolist() == [2, 3, 5, 8, 9]


@pytest.mark.parametrize("seed", range(4))
def test_sharing_counts_samples_by_their_paths(seed: int) -> None:
    samples = [s for s in accidents(seed, 7) if s.mask.any()]
    tree = merge(samples)
    wanted = np.zeros(tree.n_tokens, int)
    for i in range(len(samples)):
        mine = tree.occurrence_sample[: tree.n_occurrences] == i
        at = int(tree.edge_token[tree.occurrence_edge[: tree.n_occurrences][mine]].max())
        wanted[at] += 1
        while tree.parent[at] != at:
            at = int(tree.parent[at])
            wanted[at] += 1
    np.testing.assert_array_equal(sharing(tree), wanted)


@pytest.mark.parametrize("tile", [4, 16])
def test_tiles_are_drawn_as_the_mask_has_them(tile: int) -> None:
    tree = merge(agentic(0, 50))
    plan = tree_plan(tree.exit, tile=tile, layout="tiles", bucket=lambda n: 2 * n)
    kinds = tile_kinds(plan)
    rows = len(kinds)
    seen = visible(plan, slice(0, rows * tile)).reshape(rows, tile, rows, tile)
    np.testing.assert_array_equal(kinds != DEAD, seen.any((1, 3)))
    np.testing.assert_array_equal(kinds == FULL, seen.all((1, 3)))
    i, j = np.mgrid[: tree.n_tokens, : tree.n_tokens]
    np.testing.assert_array_equal(
        visible(plan, slice(0, tree.n_tokens)), (j <= i) & (i < tree.exit[j])
    )


@pytest.mark.parametrize("mode", ["tree", "chain", "none"])
def test_pictures_are_drawn(mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, samples in {
        "agentic": agentic(0, 50, system=1500),
        "accidents": accidents(0, 9),
        "pair": [make_sample(rng, [1, 2], [0, 1])],
    }.items():
        draw_forest_and_tiles(tmp_path / f"{name}.png", merge(samples, mode), 16, name)
        assert matplotlib.image.imread(tmp_path / f"{name}.png").std() > 0.05
