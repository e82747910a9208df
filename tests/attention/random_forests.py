"""Random forests in depth-first order, and what is visible in them by definition."""

import numpy as np

from forge_jax.attention.plan import TilePlan


def forest(n: int, seed: int) -> np.ndarray:
    """`exit` i32[n] of a random forest."""
    rng = np.random.default_rng(seed)
    exit_ = np.zeros(n, np.int32)
    path: list[int] = []
    for i in range(n):
        keep = int(rng.integers(0, len(path) + 1)) if rng.random() < 0.1 else len(path)
        for closed in path[keep:]:
            exit_[closed] = i
        path = [*path[:keep], i]
    exit_[path] = n
    return exit_


def depths(exit_: np.ndarray) -> np.ndarray:
    """How many ancestors each token has, i32[n]."""
    index = np.arange(len(exit_))
    inside = (index[None, :] <= index[:, None]) & (index[:, None] < exit_[None, :])
    return inside.sum(1).astype(np.int32) - 1


def visible(plan: TilePlan) -> np.ndarray:
    """The whole mask of a plan, bool[T', S']."""
    q_id, q_from = (np.asarray(x)[:, None] for x in (plan.q_id, plan.q_from))
    k_id, k_exit = (np.asarray(x)[None, :] for x in (plan.k_id, plan.k_exit))
    return (q_from <= k_id) & (k_id <= q_id) & (q_id < k_exit)


def fixed(size: int) -> int:
    """A list padded by half of its length again, so that padding is met."""
    return size + size // 2 + 1
