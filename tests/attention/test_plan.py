"""Plans list exactly the tiles that hold a visible pair, in every layout."""

import itertools

import numpy as np
import pytest
from random_forests import depths, fixed, forest, visible

from forge_jax.attention.plan import (
    Ids,
    TilePlan,
    build_plan,
    build_plans,
    executed_pairs,
    tree_plan,
    window_start,
)
from forge_jax.attention.tiles import unpack
from forge_jax.config import UserError


def by_tile(plan: TilePlan) -> tuple[np.ndarray, np.ndarray]:
    """Whether any, and whether every, pair of two tiles is visible; bool[nq, nk]."""
    bq, bk = plan.tile
    mask = visible(plan)
    cut = mask.reshape(mask.shape[0] // bq, bq, mask.shape[1] // bk, bk)
    return cut.any((1, 3)), cut.all((1, 3))


def listed_steps(plan: TilePlan) -> dict[tuple[int, int], bool]:
    """Listed pair -> whether it is masked; the idle tile left out."""
    steps, found = plan.lists, {}
    idle = len(plan.k_id) // plan.tile[1] - 1
    for group, width in enumerate(steps.widths):
        for n in range(steps.start[group], steps.start[group + 1]):
            at = steps.first[n]
            assert len(set(steps.row[at : at + width])) == 1
            for column in steps.column[at : at + width]:
                if column != idle:
                    assert (steps.row[at], column) not in found
                    found[int(steps.row[at]), int(column)] = group > 0
    return found


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_steps_list_each_live_tile_once(seed: int, window: int | None) -> None:
    exit_ = forest(150, seed)
    plan = tree_plan(exit_, depths(exit_), window, tile=4, bucket=fixed)
    live, full = by_tile(plan)
    found = listed_steps(plan)
    if window is None:
        assert set(found) == set(zip(*np.nonzero(live), strict=True))
    else:
        assert set(found) >= set(zip(*np.nonzero(live), strict=True))
    assert all(full[pair] for pair, masked in found.items() if not masked)


@pytest.mark.parametrize("tile", [8, (8, 16), (16, 4)])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(4))
def test_both_lists_of_tiles(seed: int, window: int | None, tile: int | tuple[int, int]) -> None:
    exit_ = forest(131, seed)
    plan = tree_plan(exit_, depths(exit_), window, tile=tile, layout="tiles", bucket=fixed)
    tiles, (live, full) = plan.lists, by_tile(plan)
    assert plan.tile == ((tile, tile) if isinstance(tile, int) else tile)
    assert len(tiles.rows) == fixed(tiles.n_rows) or window is not None
    for packed, n, starts, own in (
        (tiles.rows, tiles.n_rows, tiles.row_start, 0),
        (tiles.columns, tiles.n_columns, tiles.column_start, 1),
    ):
        assert (packed[n:] == packed[n - 1]).all()
        pairs = np.stack(unpack(packed[:n]), 1)
        assert (np.diff(pairs[:, own]) >= 0).all()
        assert set(pairs[:, own]) == set(range(live.shape[own]))  # every output is written
        for i, (a, b) in enumerate(itertools.pairwise(starts)):
            assert (pairs[a:b, own] == i).all()
            assert (np.diff(pairs[a:b, 1 - own]) > 0).all()
        found = {(int(r), int(c)): bool(m) for r, c, m in pairs}
        assert len(found) == n
        wanted = set(zip(*np.nonzero(live), strict=True))
        idle = set(found) - wanted
        if window is None:  # nothing is listed for nothing, but what has to be written
            axis = set(np.flatnonzero(~live.any(1 - own)))
            assert {pair[own] for pair in idle} == axis
        assert wanted <= set(found)
        for pair, masked in found.items():
            assert masked == (not full[pair])


def test_plans_together_have_one_shape() -> None:
    ids = [Ids(np.arange(64), np.arange(64), forest(64, seed)) for seed in range(4)]
    for layout in ("steps", "tiles"):
        plans = build_plans(ids, tile=8, layout=layout, bucket=lambda n: n)
        alone = [build_plan(*one[:3], tile=8, layout=layout, bucket=lambda n: n) for one in ids]
        shapes = {
            tuple(x.shape for x in vars(plan.lists).values() if isinstance(x, np.ndarray))
            for plan in plans
        }
        assert len(shapes) == 1
        for together, single in zip(plans, alone, strict=True):
            assert executed_pairs(together) >= executed_pairs(single) or layout == "steps"
            np.testing.assert_array_equal(visible(together), visible(single))


def test_keys_in_the_order_of_their_owners() -> None:
    """Keys gathered from several owners come in whole tiles of any order."""
    exit_ = forest(96, 1)
    order = np.random.default_rng(0).permutation(12)
    keys = (order[:, None] * 8 + np.arange(8)[None, :]).reshape(-1)
    queries = np.flatnonzero(np.isin(np.arange(96) // 8, order[:4]))
    plan = build_plan(queries, keys, exit_[keys], tile=8, layout="tiles", bucket=fixed)
    live, _ = by_tile(plan)
    rows, columns, _ = unpack(plan.lists.rows[: plan.lists.n_rows])
    assert set(zip(*np.nonzero(live), strict=True)) <= set(zip(rows, columns, strict=True))


@pytest.mark.parametrize("window", [1, 2, 9, 500])
def test_a_window_is_counted_along_the_path(window: int) -> None:
    for seed in range(5):
        exit_ = forest(120, seed)
        depth = depths(exit_)
        start = window_start(depth, window)
        index = np.arange(120)
        inside = (index[None, :] <= index[:, None]) & (index[:, None] < exit_[None, :])
        near = depth[:, None] - depth[None, :] < window
        np.testing.assert_array_equal(inside & near, inside & (start[:, None] <= index[None, :]))


def test_mistakes_are_named() -> None:
    exit_ = forest(16, 0)
    with pytest.raises(UserError, match="tile=0"):
        tree_plan(exit_, tile=0, bucket=fixed)
    with pytest.raises(UserError, match=r"tile=\(8, 16\)"):
        tree_plan(exit_, tile=(8, 16), bucket=fixed)
    with pytest.raises(UserError, match="layout='rows'"):
        tree_plan(exit_, tile=8, layout="rows", bucket=fixed)
    with pytest.raises(UserError, match="window=0"):
        tree_plan(exit_, depths(exit_), 0, tile=8, bucket=fixed)
    with pytest.raises(ValueError, match="depth"):
        tree_plan(exit_, window=3, tile=8, bucket=fixed)
    with pytest.raises(ValueError, match="ascend"):
        build_plan(np.array([3, 1]), np.arange(4), np.full(4, 4), tile=2, bucket=fixed)
    with pytest.raises(NotImplementedError, match="larger tiles"):
        tree_plan(np.arange(1, 40000), tile=1, layout="tiles", bucket=fixed)
