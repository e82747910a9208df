"""How many items of each lane a batch takes, so that what is trained has its shares.

What was consumed flows in, quotas flow out. The invariant: quotas are whole numbers that add up to
the batch, and what a lane has had beyond its share in one batch it lacks in later ones, so that
shares converge over any number of batches. No clock, no I/O; the state is plain JSON.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_jax.config import UserError

MEMORY = 64  # items that the mean length of a lane's items looks back on, about


class Shares(Protocol):
    """Quotas of lanes, in their order."""

    @property
    def least(self) -> Sequence[int]:
        """Items of each lane that every batch takes."""

    def quotas(self) -> list[int]:
        """Items of each lane in the next batch; called once a batch."""

    def count(self, lane: int, tokens: int) -> None:
        """An item of `lane`, of so many sampled tokens, was consumed."""

    def coming(self, lane: int) -> float:
        """Items of a lane that batches after the one at hand may take; inf: there is no end."""

    def state(self) -> dict[str, Any]:
        """Plain JSON; a restored one continues exactly."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`. Raises UserError where it is of other shares."""


class ItemShares:
    """Shares of consumed items: a batch takes at least the share rounded down, and over any number
    of batches a lane is within one item a lane of its share."""

    def __init__(self, names: Sequence[str], shares: Sequence[float], batch: int):
        """Raises UserError where a share is worth less than an item a batch."""
        self.batch = batch
        self.least = [math.floor(share * batch + 1e-9) for share in shares]
        for name, share, least in zip(names, shares, self.least, strict=True):
            if least < 1:
                raise UserError(f"{name}: {share=} of {batch=} is less than an item")
        self._due = [s * batch - n for s, n in zip(shares, self.least, strict=True)]
        self._credit = [0.0] * len(shares)

    def quotas(self) -> list[int]:
        self._credit = [c + d for c, d in zip(self._credit, self._due, strict=True)]
        quotas = list(self.least)
        for _ in range(self.batch - sum(quotas)):
            most = _most(self._credit)
            self._credit[most] -= 1
            quotas[most] += 1
        return quotas

    def count(self, lane: int, tokens: int) -> None:
        """Nothing to learn: `quotas` has counted the item already."""

    def coming(self, lane: int) -> float:
        return math.inf

    def state(self) -> dict[str, Any]:
        return {"unit": "items", "credit": list(self._credit)}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check(state, ["credit", "unit"], "items", len(self._credit))
        self._credit = [float(c) for c in state["credit"]]


class TokenShares:
    """Shares of consumed sampled tokens.

    A lane's credit is its share of all tokens consumed so far, less its own. Quotas are chosen one
    item after the other, each of the lane with the most credit, at the mean length of its items;
    what the items turn out to be corrects the credit. An item without tokens counts as a mean one:
    a lane whose episodes all fail takes its turns and no more. A batch may lack a lane.
    """

    def __init__(self, shares: Sequence[float], batch: int):
        self.batch = batch
        self.least = [0] * len(shares)
        self._shares = list(shares)
        self._credit = [0.0] * len(shares)
        self._mean = [0.0] * len(shares)  # tokens of a lane's items, lately; 0: none measured
        self._measured = [0] * len(shares)  # items with tokens

    def quotas(self) -> list[int]:
        credit, quotas = list(self._credit), [0] * len(self._shares)
        for _ in range(self.batch):
            most = _most(credit)
            self._settle(credit, most, self.length(most))
            quotas[most] += 1
        return quotas

    def count(self, lane: int, tokens: int) -> None:
        self._settle(self._credit, lane, tokens or self.length(lane))
        if tokens:
            self._measured[lane] += 1
            weight = 1 / min(self._measured[lane], MEMORY)
            self._mean[lane] += weight * (tokens - self._mean[lane])

    def coming(self, lane: int) -> float:
        return math.inf

    def length(self, lane: int) -> float:
        """The expected tokens of an item; of a lane that has shown none, as the others have."""
        known = [mean for mean in self._mean if mean]
        return self._mean[lane] or (sum(known) / len(known) if known else 1.0)

    def state(self) -> dict[str, Any]:
        measured = {"mean": list(self._mean), "measured": list(self._measured)}
        return {"unit": "tokens", "credit": list(self._credit)} | measured

    def restore(self, state: Mapping[str, Any]) -> None:
        lanes = len(self._shares)
        _check(state, ["credit", "mean", "measured", "unit"], "tokens", lanes)
        self._credit = [float(c) for c in state["credit"]]
        self._mean = [float(m) for m in state["mean"]]
        self._measured = list(state["measured"])

    def _settle(self, credit: list[float], lane: int, tokens: float) -> None:
        for other, share in enumerate(self._shares):
            credit[other] += share * tokens
        credit[lane] -= tokens


def _most(credit: Sequence[float]) -> int:
    return max(range(len(credit)), key=lambda lane: (credit[lane], -lane))


def _check(state: Mapping[str, Any], keys: list[str], unit: str, lanes: int) -> None:
    saved = state.get("unit")
    if saved != unit:
        raise UserError(f"saved shares: unit={saved!r}, but this run has unit={unit!r}")
    if sorted(state) != keys or any(len(state[k]) != lanes for k in keys if k != "unit"):
        raise UserError(f"saved shares: {dict(state)} is not of {lanes} lanes with {keys}")
