"""The engine's arrays on the device: weights, cache and slot states.

Plans and new weights flow in, results flow out. All but the constructor runs on the one device
thread; the cache and the states are donated to each call, so nothing else may hold them.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import programs
from forge_jax.rollout.cache import cache_sharding, empty_cache
from forge_jax.rollout.packets import Sampled, buckets, pack_prefill
from forge_jax.rollout.scheduler import Plan, Results
from forge_jax.sharding import automatic, mesh_of, replicated


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """A round that was dispatched and not read yet."""

    plan: Plan
    version: int  # of the weights
    began: float
    firsts: list[Sampled]
    block: Sampled | None


class Runner:
    """Runs plans in order, each with the newest weights published before it."""

    def __init__(self, cfg: ModelConfig, rollout: RolloutConfig, version: int):
        self.version = version  # of the weights
        self.swaps = 0
        self._cfg = cfg
        self._rollout = rollout
        self._weights: Any = None  # layers as a tuple, see programs.publish
        self._layout: Any = None  # ShapeDtypeStruct with sharding of every one that is given
        self._cache: Any = None
        self._slots: Any = None

    def start(self, params: Any) -> None:
        """Publishes the first weights and allocates cache and slots beside them."""
        self._layout = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=automatic(x.sharding)), params
        )
        self._weights = self._copy(params)
        embed, rollout = self._weights["embed"], self._rollout
        where = cache_sharding(embed.sharding, self._cfg, rollout.slots)
        self._cache = empty_cache(self._cfg, rollout.slots, rollout.context, embed.dtype, where)
        self._slots = jax.device_put(programs.empty_slots(rollout.slots), replicated(where))

    def publish(self, version: int, params: Any) -> None:
        """Copies stacked parameters to where the first ones were, and goes on with the copy.

        Raises ValueError if their tree, shapes or dtypes are not those of the first.
        """
        seen, wanted = (
            jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, self._layout)
        )
        if seen != wanted:
            raise ValueError(f"weights of {version=} differ in structure, shape or dtype")
        self._weights = self._copy(params)
        self.version = version
        self.swaps += 1

    def warm_up(self) -> None:
        """Compiles every shape by running it on padding alone; all slots must be idle."""
        rollout = self._rollout
        for size in buckets(rollout.context):
            self._prefill(pack_prefill([], rollout.prefill_rows, size, rollout.slots))
        jax.block_until_ready(self._decode())

    def advance(
        self, plan: Plan | None, unread: Flight | None, hold: bool
    ) -> tuple[Results | None, Flight | None]:
        """Dispatches `plan`, then reads `unread`, else what it dispatched unless `hold`.

        Returns the results read and the flight that stays unread.
        """
        flight = None if plan is None else self._dispatch(plan)
        if unread is None and not hold:
            unread, flight = flight, None
        return (None if unread is None else self._read(unread)), flight

    def _dispatch(self, plan: Plan) -> Flight:
        return Flight(
            plan=plan,
            version=self.version,
            began=time.monotonic(),
            firsts=[self._prefill(packed) for packed in plan.prefills],
            block=self._decode() if plan.decode else None,
        )

    def _read(self, flight: Flight) -> Results:
        firsts, block = jax.device_get((flight.firsts, flight.block))
        return Results(
            plan=flight.plan,
            firsts=tuple(firsts),
            block=block,
            version=flight.version,
            began=flight.began,
        )

    def _prefill(self, packed: np.ndarray) -> Sampled:
        self._cache, self._slots, result = programs.prefill(
            self._weights,
            self._cache,
            self._slots,
            packed,
            cfg=self._cfg,
            routes=self._rollout.routes,
            mesh=mesh_of(self._weights),
        )
        return result

    def _decode(self) -> Sampled:
        self._cache, self._slots, result = programs.decode(
            self._weights,
            self._cache,
            self._slots,
            cfg=self._cfg,
            steps=self._rollout.decode_steps,
            routes=self._rollout.routes,
            mesh=mesh_of(self._weights),
        )
        return result

    def _copy(self, params: Any) -> Any:
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), params, self._layout
        )
        return jax.block_until_ready(
            programs.publish(placed, cfg=self._cfg, dtype=self._rollout.dtype)
        )
