"""Which rank computes what: items by their cost, so that all ranks are done at once.

Costs go in; the rank of every item comes out. An item is never divided here.
"""

import heapq

import numpy as np


def assign(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Rank i64[P] of each item: in order of their cost, each to the rank that has least, of
    equals to the one with fewest items.

    The dearest rank costs at most 4/3 of what it must (Graham 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    rank = np.zeros(len(costs), np.int64)
    order = np.argsort(-np.asarray(costs), kind="stable")
    heap = [(0.0, 0, i) for i in range(ranks)]
    for item, cost in zip(order.tolist(), np.asarray(costs)[order].tolist(), strict=True):
        load, items, rank[item] = heap[0]
        heapq.heapreplace(heap, (load + cost, items + 1, int(rank[item])))
    return rank
