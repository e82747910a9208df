"""The steps of the XLA scan: one query tile against several of its key tiles at once.

Live pairs of tiles flow in; `Steps` flow out, sorted by their width, since every width is
a loop of its own.
"""

from dataclasses import field

import numpy as np

from forge_jax.attention.tiles import Ints, Pairs
from forge_jax.trees import pytree

# Key tiles that one step takes on at once. A row of query tiles is one step of the next width
# up, so gaps of an eighth cost few idle slots; every width costs a compiled loop.
LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32)
CEILINGS = (4, 8, 16, 32)  # where a plan's ladder may end: few, since each is a compilation


@pytree
class Steps:
    """Step n is the `widths[g]` listed pairs from `first[n]` on, all of one query tile,
    where ``start[g] <= n < start[g + 1]``. In the steps of group 0 every query sees every
    key. Places past the last step are padding that nobody reads.
    """

    row: Ints  # i32[C], query tile of each listed pair
    column: Ints  # i32[C], key tile of each listed pair; idle slots hold one that nobody sees
    first: Ints  # i32[L], where the pairs of each step begin
    start: Ints  # i32[len(widths) + 1], where the steps of each width begin
    widths: tuple[int, ...] = field(metadata={"static": True})


def longest_row(pairs: Pairs) -> int:
    """Pairs of the query tile that has most."""
    return int(np.bincount(pairs.row, minlength=1).max())


def pack_steps(pairs: Pairs, idle: int, longest: int) -> Steps:
    """Cuts every row into steps, filling the last of a row up with the key tile `idle`.

    Steps are as wide as rows of `longest` pairs want them. Only whole steps of the greatest
    width go unmasked: a shorter row would need two steps.
    """
    widest = next((c for c in CEILINGS if c >= longest), CEILINGS[-1])
    ladder = [w for w in LADDER if w <= widest]
    widths = np.array([widest, *ladder])
    order = np.lexsort((pairs.masked, pairs.row))  # the fully visible ones of a row first
    row, column = pairs.row[order], pairs.column[order]
    listed = np.bincount(row, minlength=1)
    full = np.bincount(row[~pairs.masked[order]], minlength=len(listed))
    place = np.arange(len(row)) - (np.cumsum(listed) - listed)[row]  # within its row

    pieces = -(-listed // widest)
    base = np.cumsum(pieces) - pieces  # first piece of each row
    of_row = np.repeat(np.arange(len(listed)), pieces)
    at = (np.arange(len(of_row)) - base[of_row]) * widest
    size = np.minimum(widest, listed[of_row] - at)
    group = np.where(at + widest <= full[of_row], 0, 1 + np.searchsorted(ladder, size))
    by_group = np.argsort(group, kind="stable")
    width = widths[group[by_group]]
    begin = np.cumsum(width) - width
    first = np.empty_like(begin)  # of each piece, in the order of the rows
    first[by_group] = begin

    columns = np.full(int(width.sum()), idle, np.int32)
    columns[first[base[row] + place // widest] + place % widest] = column
    return Steps(
        row=np.repeat(of_row[by_group], width).astype(np.int32),
        column=columns,
        first=begin.astype(np.int32),
        start=np.cumsum([0, *np.bincount(group, minlength=len(widths))], dtype=np.int32),
        widths=tuple(widths.tolist()),
    )
