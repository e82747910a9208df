"""What a micro-batch costs: predicted from its sizes, fitted to what was measured.

Sizes of micro-batches and measured seconds flow in; a `CostModel` flows out. No coefficient
is ever negative, so a larger micro-batch never costs less.

Sizes are a vector f64[..., 5]: micro-batches, tokens, attention area (visible pairs of query
and key, for one head), edges, live pairs of attention tiles.
"""

from collections import deque
from dataclasses import astuple, dataclass

import numpy as np
from scipy.optimize import nnls

from forge_jax.types import PackedTree

KEPT = 256  # newest measurements that a fit looks at
TRUST = 1e-3  # weight of the prior's shares beside one measurement


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of each size; what a micro-batch costs is their sum."""

    launch: float = 0.0  # of a micro-batch, however small
    token: float = 0.0
    area: float = 0.0  # of a visible (query, key) pair
    edge: float = 0.0
    tile: float = 0.0  # of a live pair of attention tiles

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Of sizes [..., 5]."""
        return np.asarray(sizes, np.float64) @ np.array(astuple(self))

    def without_tiles(self, side: int) -> "CostModel":
        """As much for large trees, by sizes that add up over pieces of a tree: an area of
        tiles, and a tile that is half in vain for each row of them."""
        return CostModel(
            launch=self.launch,
            token=self.token + self.tile / side,
            area=self.area + self.tile / side**2,
            edge=self.edge,
        )


BY_TOKENS = CostModel(token=1.0)


def analytic(
    *,
    layers: int,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    flops: float = 1e11,
) -> CostModel:
    """The floating-point operations of a decoder's forward and backward pass, at `flops` a
    second: 6 a weight and token, 14 a pair and dimension (the backward pass makes the scores
    again in two loops), 8 a weight of the head and edge (it makes the logits again)."""
    weights = layers * embed * (2 * head_dim * (heads + kv_heads) + 3 * ffn)
    return CostModel(
        token=6 * weights / flops,
        area=14 * layers * heads * head_dim / flops,
        edge=8 * embed * vocab / flops,
    )


def sizes_of(tree: PackedTree, tile: int) -> np.ndarray:
    """The size vector f64[5] of a micro-batch, its padding left out."""
    n = tree.n_tokens
    exit_ = tree.exit[:n].astype(np.int64)
    area = (exit_ - np.arange(n)).sum()
    # The queries that see a key tile end where the last subtree that begins in it does.
    first = np.arange(0, n, tile)
    tiles = ((np.maximum.reduceat(exit_, first) - 1) // tile - first // tile + 1).sum()
    return np.array([1, n, area, tree.n_edges, tiles], np.float64)


class Fit:
    """A cost model that follows the measurements, by least squares of the error relative to
    what was measured: compilations and pauses, many times slower than the rest, hardly count.

    The prior's division into shares holds until measurements say otherwise; its total gives
    way to the first one.
    """

    def __init__(self, prior: CostModel):
        self._prior = prior
        self._seen: deque[tuple[np.ndarray, float]] = deque(maxlen=KEPT)

    def observe(self, sizes: np.ndarray, seconds: float) -> None:
        """`seconds` that micro-batches whose sizes [5] were added up took together."""
        if not seconds > 0:
            raise ValueError(f"{seconds=} must be positive")
        self._seen.append((np.asarray(sizes, np.float64), seconds))

    def model(self) -> CostModel:
        """The prior before any measurement."""
        if not self._seen:
            return self._prior
        sizes = np.array([sizes for sizes, _ in self._seen])
        seconds = np.array([seconds for _, seconds in self._seen])
        predicted = self._prior.seconds(sizes)
        pace = seconds / np.where(predicted > 0, predicted, 1)
        # In units of the share that a size has in a typical measurement.
        unit = seconds.mean() / np.maximum(sizes.mean(axis=0), 1e-300)
        shares = float(np.median(pace)) * np.array(astuple(self._prior)) / unit
        rows = np.concatenate([sizes * unit / seconds[:, None], np.sqrt(TRUST) * np.eye(5)])
        wanted = np.concatenate([np.ones(len(seconds)), np.sqrt(TRUST) * shares])
        found, _ = nnls(rows, wanted)
        launch, token, area, edge, tile = (found * unit).tolist()
        return CostModel(launch=launch, token=token, area=area, edge=edge, tile=tile)
