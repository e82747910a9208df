"""Where to cut a tree that is too large for one micro-batch.

A forest and the range of one tree in it go in; pieces of its depth-first order come out. A
piece takes along copies of the ancestors of its first token, so it can be trained alone.
The invariant: every token, and with it the edge to it, is owned by exactly one piece.
"""

from collections.abc import Callable

import numpy as np

from forge_jax.sched.cost import CostModel
from forge_jax.types import PackedTree

FORWARD_SHARE = 1 / 3  # of a token's or a pair's cost that a forward pass alone has
WORTH = 0.06  # of a tree's cost, that carrying must save: about what contexts cost on a CPU
BLOCK = 0.02  # of the budget, that a block more must save
SLACK = 1.25  # of the makespan: uneven pieces cost nothing but memory, copies cost time
GRID = 32  # places within a budget, leaves aside, where a block may begin
EQUAL = 1e-9  # costs that differ by less are equal


class Tree:
    """Running totals over whole trees [lo, hi) of a forest, from which any piece is priced,
    live tiles aside: see `CostModel.without_tiles`. Only a single tree can be cut."""

    def __init__(self, forest: PackedTree, lo: int, hi: int, cost: CostModel):
        self.lo, self.hi = lo, hi
        self._cost = cost
        self._depth = depth = forest.depth[lo:hi].astype(np.int64)
        area = np.concatenate([[0], np.cumsum(depth + 1)])
        edges = np.searchsorted(forest.edge_token[: forest.n_edges], np.arange(lo, hi + 1))
        self._total = self._seconds(np.arange(hi - lo + 1), area, edges)
        self._exit = forest.exit[lo:hi] - lo
        ends = np.flatnonzero(self._exit == np.arange(hi - lo) + 1) + 1
        self._start, self._end = np.concatenate([[0], ends[:-1]]), ends  # of each leaf

    def _seconds(
        self, tokens: np.ndarray | int, area: np.ndarray, edges: np.ndarray | int
    ) -> np.ndarray:
        cost = self._cost
        return cost.token * tokens + cost.area * area + cost.edge * edges

    @property
    def longest(self) -> int:
        """Tokens of its longest path."""
        return int(self._depth.max()) + 1

    def _above(self, places: np.ndarray) -> np.ndarray:
        """Cost of copies of all ancestors of the tokens at `places`."""
        copies = self._depth[places]
        return self._seconds(copies, copies * (copies + 1) // 2, 0)

    def whole(self) -> float:
        """Cost of the tree in one piece, its launch aside."""
        return float(self._total[-1])

    def copies(self, starts: np.ndarray) -> float:
        """Cost of the ancestors that pieces beginning at the tokens `starts` take along."""
        return float(self._above(starts - self.lo).sum())

    def trunk(self, budget: int) -> float:
        """Cost of the tokens whose keys are carried over blocks of `budget` tokens."""
        kept = trunk_of(self._exit, block_starts(self._depth, self._exit, budget))
        return float(self._seconds(len(kept), (self._depth[kept] + 1).sum(), 0))

    def pieces(self, starts: np.ndarray) -> np.ndarray:
        """Cost of each of the pieces that begin at the tokens `starts`."""
        bounds = np.append(starts, self.hi) - self.lo
        own = self._total[bounds[1:]] - self._total[bounds[:-1]]
        return self._cost.launch + own + self._above(bounds[:-1])

    def cut(self, budget: int, parts: int = 1, slack: float = SLACK) -> np.ndarray | None:
        """First tokens i64[P] of consecutive pieces of at most `budget` tokens, copies
        included; None where a path alone is beyond the budget.

        There are as few pieces as there can be, or up to `parts` where that is more. The
        least makespan is looked for first, then the fewest copies that keep every piece
        within `slack` times it, then the most even pieces that copy no more than that.
        """
        if self.longest > budget:
            return None
        fits = self._start - self._depth[self._start] + budget
        dear = self._total[self._start] - self._above(self._start)
        to_end = self._total[self._end]

        def reach(limit: float) -> np.ndarray:
            """The leaf after the last one that a piece may have, by its first leaf."""
            by_tokens = np.searchsorted(self._end, fits, "right")
            return np.minimum(by_tokens, np.searchsorted(to_end, dear + limit, "right"))

        most = max(len(_greedy(reach(self.whole()))), parts)

        def attempt(limit: float) -> list[int]:
            return _fewest_copies(reach(limit), self._above(self._start), most)

        makespan = _least(lambda x: 0 < len(_greedy(reach(x))) <= most, 0.0, self.whole())
        fewest = self.copies(self.lo + self._start[attempt(slack * makespan)])
        enough = fewest * (1 + EQUAL)

        def copies_enough(limit: float) -> bool:
            return self.copies(self.lo + self._start[attempt(limit)]) <= enough

        limit = makespan
        if not copies_enough(limit):
            limit = _least(copies_enough, makespan, slack * makespan, halvings=6)
        return self.lo + self._start[attempt(limit)]


def _least(holds: Callable[[float], bool], low: float, high: float, halvings: int = 40) -> float:
    """The least limit for which something holds that holds for `high`, nearly."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _greedy(reach: np.ndarray) -> list[int]:
    """First leaves of pieces that are each as long as they may be; none if that is nothing."""
    found, leaf = [], 0
    while leaf < len(reach):
        found.append(leaf)
        if reach[leaf] <= leaf:
            return []
        leaf = int(reach[leaf])
    return found


def _fewest_copies(reach: np.ndarray, above: np.ndarray, most: int) -> list[int]:
    """First leaves of at most `most` pieces within `reach` whose copies, `above[i]` of a
    piece that begins at leaf i, are fewest in all; of equals the one with fewest pieces.

    Dynamic programming over (pieces, leaves). `reach` never falls, so what may begin the
    piece that ends at a leaf is an interval.
    """
    leaves = np.arange(len(reach))
    first = np.searchsorted(reach, leaves, "right")
    spent = [np.where(np.arange(len(reach) + 1) == 0, 0.0, np.inf)]  # of the first j leaves
    for _ in range(most):
        ahead = spent[-1][:-1] + above
        spent.append(np.concatenate([[np.inf], _range_min(ahead, first, leaves)]))
    pieces = int(np.argmin([row[-1] for row in spent]))
    found, end = [], len(reach)
    for row in spent[pieces - 1 :: -1]:
        low = int(first[end - 1])
        end = low + int(np.argmin(row[low:end] + above[low:end]))
        found.append(end)
    return found[::-1]


def _range_min(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Minimum of values[first[i] : last[i] + 1] for each i, inf where that is empty."""
    table = [values]  # row k: minima of 2 ** k values from each place on
    for k in range(len(values).bit_length() - 1):
        shifted = np.concatenate([table[-1][1 << k :], np.full(1 << k, np.inf)])
        table.append(np.minimum(table[-1], shifted))
    count = last - first + 1
    row = np.maximum(np.frexp(count)[1] - 1, 0)
    left, right = np.minimum(first, len(values) - 1), last - (1 << row) + 1
    stacked = np.stack(table)
    return np.where(count > 0, np.minimum(stacked[row, left], stacked[row, right]), np.inf)


def carries(tree: Tree, starts: np.ndarray, budget: int) -> bool:
    """Whether to carry keys and values from block to block rather than cut at `starts`: the
    copies cost more than a forward pass over the tokens that are carried, by a margin."""
    saved = tree.copies(starts) - FORWARD_SHARE * tree.trunk(budget)
    return saved > WORTH * tree.whole()


def block_starts(depth: np.ndarray, exit: np.ndarray, budget: int) -> np.ndarray:
    """First tokens i64[B] of blocks of at most `budget` tokens of a tree, by the `depth` and
    the `exit` of its tokens: few blocks that begin below few ancestors.

    A block costs `BLOCK` of the budget, an ancestor its forward pass. Blocks begin where
    leaves do, or at a grid. Dynamic programming from the last place to the first.
    """
    n = len(depth)
    leaves = np.flatnonzero(exit == np.arange(n) + 1) + 1
    grid = np.arange(0, n, max(1, budget // GRID))
    places = np.union1d(leaves[leaves < n], grid)
    price = BLOCK * budget + FORWARD_SHARE * depth[places]
    ends = np.append(places, n)
    last = np.searchsorted(ends, places + budget, "right") - 1  # furthest end of a block
    total = np.zeros(len(places) + 1)  # of the blocks from each place on
    following = np.zeros(len(places), np.int64)
    for i in range(len(places) - 1, -1, -1):
        reach = total[i + 1 : last[i] + 1]
        following[i] = i + 1 + int(np.argmin(reach))
        total[i] = price[i] + total[following[i]]
    found = [0]
    while following[found[-1]] < len(places):
        found.append(int(following[found[-1]]))
    return places[found]


def trunk_of(exit: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Places of all ancestors of the tokens `starts` of a tree, ascending. With a token its
    ancestors are among them."""
    found = np.zeros(len(exit), bool)
    for start in starts.tolist():
        found[:start] |= exit[:start] > start
    return np.flatnonzero(found)


def ancestors(forest: PackedTree, root: int, token: int) -> np.ndarray:
    """Places of the tokens from `root` down to `token`, without it."""
    return root + np.flatnonzero(forest.exit[root:token] > token)
