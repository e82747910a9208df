"""Shares of lanes that change after given batches, as one domain after the other has them.

Stages flow in, quotas flow out as from `ItemShares`, which each stage has of its own, over the
lanes that have a share in it. The invariant: a lane without a share has no quota, and none to come.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_jax.config import UserError
from forge_jax.sched.shares import ItemShares


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Shares in a row of batches."""

    shares: tuple[float, ...]  # of every lane, which add up to 1; 0: it has none
    until: int | None  # its last batch, from 1; None: there is no other stage


class StagedShares:
    """Quotas of one stage after the other."""

    def __init__(self, names: Sequence[str], stages: Sequence[Stage], batch: int):
        """Raises UserError where a share that is not 0 is worth less than an item a batch."""
        self.batch = batch
        self._stages = tuple(stages)
        self._lanes = [[i for i, share in enumerate(one.shares) if share] for one in stages]
        self._shares = [
            ItemShares([names[i] for i in lanes], [one.shares[i] for i in lanes], batch)
            for one, lanes in zip(stages, self._lanes, strict=True)
        ]
        each = [self._spread(at, shares.least) for at, shares in enumerate(self._shares)]
        self.least = [min(own) for own in zip(*each, strict=True)]
        self._given = 0  # batches

    def quotas(self) -> list[int]:
        self._given += 1
        at = self._at()
        return self._spread(at, self._shares[at].quotas())

    def count(self, lane: int, tokens: int) -> None:
        """Nothing to learn, as in `ItemShares`."""

    def coming(self, lane: int) -> float:
        """Of later batches in this stage, rounded down."""
        stage = self._stages[self._at()]
        if not stage.shares[lane]:
            return 0
        if stage.until is None:
            return math.inf
        return math.floor(stage.shares[lane] * self.batch * (stage.until - self._given) + 1e-9)

    def state(self) -> dict[str, Any]:
        return {
            "unit": "stages",
            "given": self._given,
            "stages": [shares.state() for shares in self._shares],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        unit, count = state.get("unit"), len(self._shares)
        if unit != "stages" or len(state["stages"]) != count:
            raise UserError(f"saved shares: {dict(state)} is not of {count} stages")
        for shares, saved in zip(self._shares, state["stages"], strict=True):
            shares.restore(saved)
        self._given = state["given"]

    def _at(self) -> int:
        """The stage of the batch whose quotas were given last."""
        ends = (math.inf if one.until is None else one.until for one in self._stages)
        return next(at for at, end in enumerate(ends) if self._given <= end)

    def _spread(self, at: int, quotas: Sequence[int]) -> list[int]:
        """Quotas of a stage's lanes as those of all."""
        own = dict(zip(self._lanes[at], quotas, strict=True))
        return [own.get(lane, 0) for lane in range(len(self._stages[at].shares))]
