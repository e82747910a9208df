"""Tile lists of prefix-tree attention, made once per micro-batch on the host.

Id vectors flow in; a `TilePlan` of numpy arrays flows out, ready to be passed to a jitted
function. A pair of tiles is listed iff some query of the one sees some key of the other.
"""

from collections.abc import Callable
from dataclasses import field

import jax
import numpy as np

from forge_jax.config import UserError
from forge_jax.trees import pytree

Ints = jax.Array | np.ndarray
NOTHING = -1  # q_id of a padding query, which sees no key


@pytree
class TilePlan:
    """Which tiles attention visits, and the ids that decide inside a tile.

    Query i sees key j iff ``k_id[j] <= q_id[i] < k_exit[j]``.
    """

    q_id: Ints  # i32[T'], padded to whole tiles with -1
    k_id: Ints  # i32[S'], padded to whole tiles
    k_exit: Ints  # i32[S'], 0 at padding
    row: Ints  # i32[L], query tile of each live tile, ascending
    column: Ints  # i32[L], key tile of each live tile
    kind: Ints  # i32[L], SKIP, FULL or MASKED
    tile: int = field(metadata={"static": True})


SKIP, FULL, MASKED = 0, 1, 2


def build_plan(
    q_id: np.ndarray,
    k_id: np.ndarray,
    k_exit: np.ndarray,
    *,
    tile: int = 64,
    bucket: Callable[[int], int],
) -> TilePlan:
    """Plans attention of T queries over S keys.

    `bucket` maps the length of a tile list to its padded length, which is what bounds
    the number of compilations. Raises UserError if `tile` is not positive.
    """
    if tile < 1:
        raise UserError(f"tile={tile} must be positive")
    q_id = _pad(q_id, tile, NOTHING)
    k_id, k_exit = _pad(k_id, tile, 0), _pad(k_exit, tile, 0)
    q, ids, exits = (x.reshape(-1, tile) for x in (q_id, k_id, k_exit))
    found: tuple[list, list, list] = [], [], []
    for i, queries in enumerate(q):
        sees = (ids[:, None, :] <= queries[None, :, None]) & (
            queries[None, :, None] < exits[:, None, :]
        )
        live = np.flatnonzero(sees.any((1, 2)))
        found[0].append(np.full(len(live), i))
        found[1].append(live)
        found[2].append(np.where(sees[live].all((1, 2)), FULL, MASKED))
    lists = [np.concatenate(x).astype(np.int32) if x else np.zeros(0, np.int32) for x in found]
    n = len(lists[0])
    size = bucket(n)
    row, column, kind = (np.pad(x, (0, size - n)) for x in lists)
    return TilePlan(
        q_id=q_id, k_id=k_id, k_exit=k_exit, row=row, column=column, kind=kind, tile=tile
    )


def tree_plan(exit: np.ndarray, *, tile: int = 64, bucket: Callable[[int], int]) -> TilePlan:
    """The plan of a packed forest's attention to itself; ``exit`` as in `PackedTree`."""
    ids = np.arange(len(exit), dtype=np.int32)
    return build_plan(ids, ids, exit, tile=tile, bucket=bucket)


def _pad(x: np.ndarray, tile: int, value: int) -> np.ndarray:
    missing = padded_length(len(x), tile) - len(x)
    return np.pad(x.astype(np.int32), (0, missing), constant_values=value)


def padded_length(n: int, tile: int) -> int:
    """Whole tiles of n tokens, at least one."""
    return max(1, -(-n // tile)) * tile
