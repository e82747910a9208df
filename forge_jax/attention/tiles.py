"""The live pairs of tiles: which query tile has to meet which key tile.

Id vectors cut into tiles flow in; pairs flow out, as host arrays and as the packed lists
that Pallas kernels walk. A pair that is not listed holds no query that sees a key.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from forge_jax.trees import pytree

Ints = jax.Array | np.ndarray

NOBODY = -1  # q_id of a padding query, which sees no key
NEVER = np.iinfo(np.int32).max
MOST = 1 << 15  # tiles of a side that a packed pair can name


class Pairs(NamedTuple):
    """Live pairs in column-major order: by key tile, then by query tile."""

    row: np.ndarray  # i64[L], query tile
    column: np.ndarray  # i64[L], key tile
    masked: np.ndarray  # bool[L], False where every query of the one sees every key of the other


@pytree
class Tiles:
    """Live pairs in two orders, each pair packed into one integer: see `unpack`.

    Every query tile is in `rows` and every key tile in `columns` at least once, as a masked
    pair where nothing is visible, so that a kernel writes every tile of its output. Places
    after the real pairs repeat the last one.
    """

    rows: Ints  # i32[L], by query tile, then by key tile
    columns: Ints  # i32[L'], by key tile, then by query tile
    n_rows: Ints  # i32[], real pairs of `rows`
    n_columns: Ints  # i32[]
    row_start: Ints  # i32[nq + 1]: rows[row_start[r]:row_start[r + 1]] are of query tile r
    column_start: Ints  # i32[nk + 1]


def live_pairs(q_id: np.ndarray, q_from: np.ndarray, k_id: np.ndarray, k_exit: np.ndarray) -> Pairs:
    """Pairs of query tiles [nq, bq] and key tiles [nk, bk].

    Query ids ascend up to the padding at their end. In a depth-first order the queries that
    see a key are consecutive, so that the live rows of a key tile are one range, bounded by
    its least id and its greatest exit; where queries are all there, exactly the live pairs
    are listed. A sliding window then leaves out the pairs it can.
    """
    real = q_id != NOBODY
    rows = int(real[:, 0].sum())  # the tiles that are not all padding
    low = np.where(real, q_id, NEVER).min(1)
    high = q_id.max(1)
    seen = k_exit > k_id
    earliest = np.where(seen, k_id, NEVER).min(1)
    latest_exit = np.where(seen, k_exit, 0).max(1)
    first = np.searchsorted(high[:rows], earliest)
    size = np.maximum(0, np.searchsorted(low[:rows], latest_exit) - first)
    column = np.repeat(np.arange(len(k_id)), size)
    row = np.arange(len(column)) + np.repeat(first - np.cumsum(size) + size, size)

    horizon = np.where(real, q_from, NEVER).min(1)
    kept = k_id.max(1)[column] >= horizon[row]
    row, column = row[kept], column[kept]
    full = (
        (k_id.max(1)[column] <= q_id.min(1)[row])  # -1 where a query is padding
        & (high[row] < k_exit.min(1)[column])  # 0 where a key is padding
        & (q_from.max(1)[row] <= k_id.min(1)[column])
    )
    return Pairs(row, column, ~full)


def pack_tiles(pairs: Pairs, nq: int, nk: int) -> Tiles:
    """The lists of `nq` query and `nk` key tiles, without padding.

    Raises NotImplementedError for more tiles than a packed pair can name.
    """
    if max(nq, nk) > MOST:
        raise NotImplementedError(f"{nq} x {nk} tiles; a side may have {MOST}: use larger tiles")
    packed = pack(pairs.row, pairs.column, pairs.masked)
    idle_rows = np.setdiff1d(np.arange(nq), pairs.row)
    idle_columns = np.setdiff1d(np.arange(nk), pairs.column)
    rows = np.sort(np.append(packed, idle_rows << 16 | 1))
    columns = np.append(packed, idle_columns << 1 | 1)
    column = np.append(pairs.column, idle_columns)
    columns = columns[np.argsort(column, kind="stable")]
    return Tiles(
        rows=rows.astype(np.int32),
        columns=columns.astype(np.int32),
        n_rows=np.array(len(rows), np.int32),
        n_columns=np.array(len(columns), np.int32),
        row_start=_starts(rows >> 16, nq),
        column_start=_starts(column, nk),
    )


def pack(row: Any, column: Any, masked: Any) -> Any:
    """One integer for a query tile, a key tile and whether the pair is masked."""
    return row << 16 | column << 1 | masked


def unpack(pair: Any) -> tuple[Any, Any, Any]:
    """(query tile, key tile, masked) of packed pairs; masked is 0 or 1."""
    return pair >> 16, pair >> 1 & MOST - 1, pair & 1


def alike(lists: Sequence[Any], names: Sequence[str], length: Callable[[int], int]) -> list[Any]:
    """`lists` with the arrays `names` of all padded to the `length` of the longest, each
    repeating its last entry."""

    def extend(x: np.ndarray, size: int) -> np.ndarray:
        return np.append(x, np.full(size - len(x), x[-1] if len(x) else 0, x.dtype))

    sizes = {name: length(max(len(getattr(one, name)) for one in lists)) for name in names}
    return [
        dataclasses.replace(
            one, **{name: extend(getattr(one, name), size) for name, size in sizes.items()}
        )
        for one in lists
    ]


def _starts(tile: np.ndarray, tiles: int) -> np.ndarray:
    return np.cumsum([0, *np.bincount(tile, minlength=tiles)], dtype=np.int32)
