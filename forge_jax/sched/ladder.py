"""The ladders that padded sizes climb: a size in, the rung that holds it out; and the padding."""

import numpy as np

EDGES_PER_TOKEN = 1 / 32  # of the first rung of edges
OCCURRENCES_GROWTH = 4  # from rung to rung; an occurrence is but a few scalars


def bucket(n: int, smallest: int, ratio: float, multiple: int) -> int:
    """The first size >= `n` of a ladder that starts at `smallest` and grows by `ratio`.

    Every rung is rounded up to a multiple of `multiple`.
    """
    rung = round_up(smallest, multiple)
    while rung < n:
        rung = round_up(rung * ratio, multiple)
    return rung


def round_up(size: float, multiple: int) -> int:
    return int(-(-size // multiple)) * multiple


def edges_rung(edges: int, tokens: int, growth: float = 2.0) -> int:
    """Padded number of edges of a micro-batch of `tokens` padded tokens."""
    return bucket(edges, max(1, int(tokens * EDGES_PER_TOKEN)), growth, 1)


def fill(x: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """`x` [N, ...] padded to `size` with `value`, in its own dtype.

    Raises ValueError if size < N.
    """
    return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), value, x.dtype)])
