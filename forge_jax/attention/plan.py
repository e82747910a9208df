"""What attention visits, decided once per micro-batch on the host.

Id vectors flow in; a `TilePlan` of numpy arrays flows out, ready to be passed to a jitted
function. Ids are places in the depth-first order of a forest, so that one predicate serves
a forest's attention to itself, a part of it, and a part against what it hangs from.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np

from forge_jax.attention.steps import Steps, longest_row, pack_steps
from forge_jax.attention.tiles import NOBODY, Ints, Pairs, Tiles, alike, live_pairs, pack_tiles
from forge_jax.config import UserError
from forge_jax.trees import pytree

Bucket = Callable[[int], int]  # length of a list to its padded length


@pytree
class TilePlan:
    """Which tiles attention visits, and the ids that decide inside a tile.

    Query i sees key j iff ``q_from[i] <= k_id[j] <= q_id[i] < k_exit[j]``.
    """

    q_id: Ints  # i32[T'], padded to whole query tiles with -1
    q_from: Ints  # i32[T'], least id that a query sees; 0 without a window
    k_id: Ints  # i32[S'], padded to whole key tiles; `Steps` have one more, which nobody sees
    k_exit: Ints  # i32[S'], 0 at padding
    lists: Tiles | Steps
    tile: tuple[int, int] = field(metadata={"static": True})  # of queries, of keys
    windowed: bool = field(metadata={"static": True})  # False: `q_from` is 0 everywhere


class Ids(NamedTuple):
    """Queries and keys of one attention, as places in a depth-first order."""

    q_id: np.ndarray  # [T], ascending, at least 0
    k_id: np.ndarray  # [S], at least 0
    k_exit: np.ndarray  # [S], index past the key's subtree
    q_from: np.ndarray | None = None  # [T], least id that a query sees; None: no window


def build_plan(
    q_id: np.ndarray,
    k_id: np.ndarray,
    k_exit: np.ndarray,
    q_from: np.ndarray | None = None,
    *,
    tile: int | tuple[int, int] = 64,
    layout: str = "steps",
    bucket: Bucket,
) -> TilePlan:
    """Plans attention of T queries over S keys; see `build_plans`."""
    ids = Ids(q_id, k_id, k_exit, q_from)
    return build_plans([ids], tile=tile, layout=layout, bucket=bucket)[0]


def build_plans(
    parts: Sequence[Ids],
    *,
    tile: int | tuple[int, int] = 64,
    layout: str = "steps",
    bucket: Bucket,
) -> list[TilePlan]:
    """Plans whose lists have equal shapes: they stack where T and S are equal too.

    `layout` is "steps" for the XLA scan or "tiles" for the Pallas kernels. Where keys ascend,
    as in a forest, the fewest tiles are listed. `bucket` bounds the number of compilations.
    Raises UserError for a `tile` or a `layout` that cannot be, ValueError for query ids that
    do not ascend.
    """
    sides = (tile, tile) if isinstance(tile, int) else tile
    if min(sides) < 1 or (layout == "steps" and sides[0] != sides[1]):
        raise UserError(f"tile={tile} must be positive, and one number for the xla scan")
    if layout not in ("steps", "tiles"):
        raise UserError(f"layout={layout!r} must be steps or tiles")
    padded = [_padded(ids, *sides, idle=layout == "steps") for ids in parts]
    tiled = [
        [x.reshape(-1, side) for x, side in zip(ids, np.repeat(sides, 2), strict=True)]
        for ids in padded
    ]
    pairs = [live_pairs(*ids) for ids in tiled]
    lists = _lists(pairs, [(len(ids[0]), len(ids[2])) for ids in tiled], layout, bucket)
    return [
        TilePlan(
            q_id=q_id,
            q_from=q_from,
            k_id=k_id,
            k_exit=k_exit,
            lists=made,
            tile=sides,
            windowed=any(ids.q_from is not None for ids in parts),
        )
        for (q_id, q_from, k_id, k_exit), made in zip(padded, lists, strict=True)
    ]


def tree_plan(
    exit: np.ndarray,
    depth: np.ndarray | None = None,
    window: int | None = None,
    *,
    tile: int | tuple[int, int] = 64,
    layout: str = "steps",
    bucket: Bucket,
) -> TilePlan:
    """The plan of a packed forest's attention to itself; `exit` and `depth` as in
    `PackedTree`. With a `window` a token sees itself and the `window` - 1 tokens before it
    on its path."""
    ids = np.arange(len(exit), dtype=np.int32)
    horizon = None
    if window is not None:
        if depth is None:
            raise ValueError(f"{window=} is counted along the depth of tokens, which is not given")
        horizon = window_start(depth, window)
    return build_plan(ids, ids, exit, horizon, tile=tile, layout=layout, bucket=bucket)


def window_start(depth: np.ndarray, window: int) -> np.ndarray:
    """For each token of a depth-first forest the ancestor `window` - 1 levels up, i32[N];
    its root where there are fewer.

    Ancestors' ids ascend with their depth, so that a window by depth is one lower bound. The
    ancestor at some depth is the last token of that depth so far. Raises UserError for a
    window that is not positive.
    """
    if window < 1:
        raise UserError(f"{window=} must be at least 1")
    n = len(depth)
    key = depth.astype(np.int64) * n + np.arange(n)
    order = np.argsort(key)
    wanted = np.maximum(depth.astype(np.int64) - (window - 1), 0) * n + np.arange(n)
    return order[np.searchsorted(key[order], wanted, side="right") - 1].astype(np.int32)


def padded_length(n: int, tile: int) -> int:
    """Whole tiles of n tokens, at least one."""
    return max(1, -(-n // tile)) * tile


def executed_pairs(plan: TilePlan) -> int:
    """(query, key) pairs in the tiles that attention visits, for one head."""
    area = plan.tile[0] * plan.tile[1]
    if isinstance(plan.lists, Tiles):
        return int(plan.lists.n_rows) * area
    return int(np.dot(np.diff(plan.lists.start), plan.lists.widths)) * area


def _lists(pairs: list[Pairs], shapes: list[tuple[int, int]], layout: str, bucket: Bucket) -> list:
    if layout == "tiles":
        made = [pack_tiles(p, *shape) for p, shape in zip(pairs, shapes, strict=True)]
        return alike(made, ("rows", "columns"), bucket)
    longest = max(map(longest_row, pairs))
    steps = [pack_steps(p, nk - 1, longest) for p, (_, nk) in zip(pairs, shapes, strict=True)]
    # A step reads its width whether or not the list is that long.
    return alike(steps, ("row", "column", "first"), lambda n: max(bucket(n), steps[0].widths[0]))


def _padded(ids: Ids, bq: int, bk: int, idle: bool) -> tuple[np.ndarray, ...]:
    """(q_id, q_from, k_id, k_exit) in whole tiles, and an `idle` tile of keys."""
    if np.any(np.diff(ids.q_id) < 0):
        raise ValueError("query ids do not ascend")
    horizon = np.zeros(len(ids.q_id), np.int32) if ids.q_from is None else ids.q_from
    spare = bk * idle
    return (
        _pad(ids.q_id, bq, 0, NOBODY),
        _pad(horizon, bq, 0, 0),
        _pad(ids.k_id, bk, spare, 0),
        _pad(ids.k_exit, bk, spare, 0),
    )


def _pad(x: np.ndarray, tile: int, spare: int, value: int) -> np.ndarray:
    missing = padded_length(len(x), tile) + spare - len(x)
    return np.pad(x.astype(np.int32), (0, missing), constant_values=value)
