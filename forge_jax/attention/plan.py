"""Tile lists of prefix-tree attention, made once per micro-batch on the host.

Id vectors flow in; a `TilePlan` of numpy arrays flows out, ready to be passed to a jitted
function. A pair of tiles that is not listed holds no query that sees a key.
"""

from collections.abc import Callable, Iterator
from dataclasses import field

import jax
import numpy as np

from forge_jax.config import UserError
from forge_jax.trees import pytree

Ints = jax.Array | np.ndarray

NOBODY = -1  # q_id of a padding query, which sees no key
# Key tiles that one step takes on at once. A row of query tiles is one step of the next width
# up, so gaps of an eighth cost few idle slots; every width costs a compiled loop.
LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32)
CEILINGS = (4, 8, 16, 32)  # where a plan's ladder may end: few, since each is a compilation


@pytree
class TilePlan:
    """Which tiles attention visits, and the ids that decide inside a tile.

    Query i sees key j iff ``k_id[j] <= q_id[i] < k_exit[j]``. A *step* takes one query tile
    and several key tiles: step n is the `widths[g]` listed pairs from `first[n]` on, all of
    one row, where ``start[g] <= n < start[g + 1]``. In the steps of group 0 every query
    sees every key. Places past the last step are padding that nobody reads.
    """

    q_id: Ints  # i32[T'], padded to whole tiles with -1
    k_id: Ints  # i32[S' + tile], padded to whole tiles, and a tile that nobody sees
    k_exit: Ints  # i32[S' + tile], 0 at padding
    row: Ints  # i32[C], query tile of each listed pair
    column: Ints  # i32[C], key tile of each listed pair; idle slots hold the last, unseen one
    first: Ints  # i32[L], where the pairs of each step begin
    start: Ints  # i32[len(widths) + 1], where the steps of each width begin
    widths: tuple[int, ...] = field(metadata={"static": True})
    tile: int = field(metadata={"static": True})


def build_plan(
    q_id: np.ndarray,
    k_id: np.ndarray,
    k_exit: np.ndarray,
    *,
    tile: int = 64,
    bucket: Callable[[int], int],
) -> TilePlan:
    """Plans attention of T queries over S keys.

    Ids are at least 0. Where they ascend, as in a packed forest, exactly the live tiles are
    listed; else perhaps more. `bucket` maps the length of a list to its padded length, and
    so bounds the number of compilations. Raises UserError if `tile` is not positive.
    """
    if tile < 1:
        raise UserError(f"tile={tile} must be positive")
    q_id = _pad(q_id, tile, NOBODY)
    k_id, k_exit = (np.append(_pad(x, tile, 0), np.zeros(tile, np.int32)) for x in (k_id, k_exit))
    rows = list(_rows(*(x.reshape(-1, tile) for x in (q_id, k_id, k_exit))))
    longest = max(len(columns) for columns, _ in rows)
    ceiling = next((c for c in CEILINGS if c >= longest), CEILINGS[-1])
    ladder = [w for w in LADDER if w <= ceiling]
    groups: list[list[tuple[int, np.ndarray]]] = [[] for _ in (0, *ladder)]
    for i, (columns, n_full) in enumerate(rows):
        for group, step in _steps(columns, n_full, ladder, idle=len(k_id) // tile - 1):
            groups[group].append((i, step))
    widths = (ceiling, *ladder)
    flat = [step for group in groups for step in group]
    column = np.concatenate([columns for _, columns in flat] or [np.zeros(0, np.int32)])
    lengths = [len(columns) for _, columns in flat]
    row = np.repeat(np.array([r for r, _ in flat], np.int32), lengths)
    first = np.cumsum([0, *lengths])[:-1]
    # A step reads its width whether or not the list is that long.
    pairs, steps = max(bucket(len(column)), ceiling), max(bucket(len(first)), 1)
    return TilePlan(
        q_id=q_id,
        k_id=k_id,
        k_exit=k_exit,
        row=_extend(row, pairs),
        column=_extend(column, pairs),
        first=_extend(first, steps),
        start=np.cumsum([0] + [len(group) for group in groups], dtype=np.int32),
        widths=widths,
        tile=tile,
    )


def tree_plan(exit: np.ndarray, *, tile: int = 64, bucket: Callable[[int], int]) -> TilePlan:
    """The plan of a packed forest's attention to itself; ``exit`` as in `PackedTree`."""
    ids = np.arange(len(exit), dtype=np.int32)
    return build_plan(ids, ids, exit, tile=tile, bucket=bucket)


def padded_length(n: int, tile: int) -> int:
    """Whole tiles of n tokens, at least one."""
    return max(1, -(-n // tile)) * tile


def _rows(q_id: np.ndarray, k_id: np.ndarray, k_exit: np.ndarray) -> Iterator[tuple]:
    """Per query tile: its live key tiles [n], the fully visible ones first, and their number.

    Decided by the least and greatest ids of a tile.
    """
    never = np.iinfo(np.int32).max
    seen = k_exit > k_id
    earliest = np.where(seen, k_id, never).min(1)
    latest_exit = np.where(seen, k_exit, 0).max(1)
    latest, earliest_exit = k_id.max(1), k_exit.min(1)
    for queries in q_id:
        low, high = queries.min(), queries.max()
        lowest = queries.min(initial=never, where=queries != NOBODY)
        live = np.flatnonzero((earliest <= high) & (lowest < latest_exit))
        full = (latest[live] <= low) & (high < earliest_exit[live])
        yield np.concatenate([live[full], live[~full]]), int(full.sum())


def _steps(
    columns: np.ndarray, n_full: int, ladder: list[int], idle: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts a row into steps (group, key tiles), the last one filled up with the idle tile.

    Only whole steps of the greatest width go unmasked: a shorter row would need two steps.
    """
    widest = ladder[-1]
    unmasked = n_full // widest * widest
    for at in range(0, len(columns), widest):
        piece = columns[at : at + widest]
        if at < unmasked:
            yield 0, piece
        else:
            group = int(np.searchsorted(ladder, len(piece)))
            yield 1 + group, np.append(piece, np.full(ladder[group] - len(piece), idle))


def _pad(x: np.ndarray, tile: int, value: int) -> np.ndarray:
    missing = padded_length(len(x), tile) - len(x)
    return np.pad(x.astype(np.int32), (0, missing), constant_values=value)


def _extend(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x.astype(np.int32), (0, length - len(x)))
