"""The engine's arrays on the device: weights, pool and slot states.

Plans and new weights flow in, results flow out. All but the constructor runs on the one device
thread; the pool and the states are donated to each call, so nothing else may hold them.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import moving, programs, scoring, shaped_programs
from forge_jax.rollout.cache import beside, empty_pool, pool_sharding
from forge_jax.rollout.modules import Drafting
from forge_jax.rollout.moving import Pages
from forge_jax.rollout.packets import (
    SCRATCH,
    DecodeShape,
    PrefillShape,
    Sampled,
    decode_shapes,
    pack_decode,
    pack_prefill,
    pack_settings,
    prefill_shapes,
    scored_shapes,
    shaped_shapes,
)
from forge_jax.rollout.plans import Plan, Results
from forge_jax.rollout.shaped import Told
from forge_jax.rollout.slots import empty_slots
from forge_jax.rollout.speculation import Drafter, empty_drafter, renewed
from forge_jax.rollout.tiers.fingerprint import fingerprint
from forge_jax.sharding import automatic, mesh_of, replicated


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """A round that was dispatched and not read yet."""

    plan: Plan
    version: int  # of the weights
    began: float
    prefilled: list[tuple[Any, Any]]  # routes and scores of each prefill call
    block: Sampled | None


class Runner:
    """Runs plans in order, each with the newest weights published before it."""

    def __init__(self, cfg: ModelConfig, rollout: RolloutConfig, version: int):
        self.version = version  # of the weights
        self.swaps = 0
        self.digest = b""  # of the weights, where pages are stored for others
        self._cfg = cfg
        self._rollout = rollout
        self._weights: Any = None  # layers as a tuple, see programs.publish
        self._layout: Any = None  # ShapeDtypeStruct with sharding of every one that is given
        self._pool: Any = None
        self._slots: Any = None
        self._attention = rollout.attention  # over pages; settled where weights are known
        self._drafter: Drafter = None

    def start(self, params: Any) -> None:
        """Publishes the first weights, and allocates what is beside them."""
        self._layout = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=automatic(x.sharding)), params
        )
        self._weights = self._copy(params)
        self.allocate()

    def allocate(self) -> None:
        """Empty pool and slots beside the weights: at the start, and after a fault, which may have
        taken those that were donated to a call."""
        embed, rollout = self._weights["embed"], self._rollout
        where = pool_sharding(embed.sharding, self._cfg, rollout.dealt)
        sizes = (rollout.pool_pages, rollout.page, embed.dtype, where, rollout.modules)
        self._pool = empty_pool(self._cfg, *sizes)
        self._slots = jax.device_put(empty_slots(rollout.slots), beside(where))
        self._drafter = empty_drafter(rollout, self._cfg, embed.dtype, where)
        if self._attention == "auto":
            [platform] = {device.platform for device in embed.devices()}
            self._attention = "pallas" if platform == "tpu" else "xla"

    def publish(self, version: int, params: Any) -> None:
        """Copies stacked parameters to where the first ones were, and goes on with the copy.

        Raises ValueError if their tree, shapes or dtypes are not those of the first.
        """
        seen, wanted = (
            jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, self._layout)
        )
        if seen != wanted:
            raise ValueError(f"weights of {version=} differ in structure, shape or dtype")
        self._weights, self._drafter = self._copy(params), renewed(self._drafter)
        self.version = version
        self.swaps += 1

    @property
    def page(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of what a page holds, all layers together."""
        keys = self._pool[0][0]
        return (len(self._pool), 2, *keys.shape[1:]), keys.dtype

    @property
    def page_sharding(self) -> Sharding:
        """Where pages on their own belong, beside the pool."""
        where = self._pool[0][0].sharding
        if not isinstance(where, NamedSharding):
            return where
        return NamedSharding(where.mesh, jax.P(None, None, *where.spec[1:2]))

    @property
    def _moved_sharding(self) -> Sharding:
        """Where many pages are together that leave the pool or are to enter it."""
        where = self.page_sharding
        if not isinstance(where, NamedSharding):
            return where
        return NamedSharding(where.mesh, jax.P(None, *where.spec))

    @property
    def _tails(self) -> Any:
        """States that modules go on from, of every page, if there are modules."""
        return self._drafter.tails if isinstance(self._drafter, Drafting) else None

    def seconds_a_token(self) -> float:
        """What computing a token of a prompt takes, measured on a call of padding that is
        compiled; all slots must be idle."""
        shape = prefill_shapes(self._rollout)[-1]
        packet = pack_prefill([], shape, self._rollout)
        began = time.monotonic()
        self._prefill(packet, shape)
        jax.block_until_ready(self._pool)
        return (time.monotonic() - began) / self._rollout.chunk

    def warm_up(self) -> None:
        """Compiles every shape by running it on padding alone; all slots must be idle."""
        for prefill in (*prefill_shapes(self._rollout), *scored_shapes(self._rollout)):
            self._prefill(pack_prefill([], prefill, self._rollout), prefill)
        for decode in decode_shapes(self._rollout):
            self._decode(pack_decode([], [], decode, self._rollout), decode)
        shaped = shaped_shapes(self._rollout, self._cfg.vocab) if self._rollout.shaping else ()
        for shape in shaped:
            packet = pack_decode([], [], shape, self._rollout)
            settings = pack_settings([], shape.steps, shape, self._rollout.page)
            self._decode(np.concatenate([packet, settings]), shape)
        staged = self.stage([SCRATCH])
        self.ingest([SCRATCH], staged)
        if self._rollout.tiered:  # what comes from the host is a program of its own
            self.ingest([SCRATCH], jax.device_get(staged))
        jax.block_until_ready(self._pool)

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

    def stage(self, pages: Sequence[int]) -> list[Pages]:
        """Copies of pages as they are after the calls dispatched so far, `MOVED` in each part;
        any thread may read these, as none may read the pool."""
        tails, where = self._tails, self._moved_sharding
        return [moving.export(self._pool, tails, part, where) for part in moving.chunks(pages)]

    def landed(self, parts: Sequence[Pages]) -> list[Pages]:
        """Parts that were staged on whatever devices, on those of the pool; any thread may do
        this, and waits until they are there."""
        kv, tails = self._moved_sharding, replicated(self._moved_sharding)
        found = [
            Pages(
                kv=moving.carried(part.kv, kv),
                tails=None if part.tails is None else moving.carried(part.tails, tails),
            )
            for part in parts
        ]
        return jax.block_until_ready(found)

    def ingest(self, pages: Sequence[int], parts: Sequence[Pages]) -> None:
        """Writes parts that have landed, or are of the host, to pages; what is not wanted of
        them goes to `SCRATCH`."""
        for part, chunk in zip(parts, moving.chunks(pages), strict=True):
            self._pool, tails = moving.ingest(self._pool, self._tails, chunk, part)
            if isinstance(self._drafter, Drafting):
                self._drafter = dataclasses.replace(self._drafter, tails=tails)

    def _dispatch(self, plan: Plan) -> Flight:
        began = time.monotonic()
        prefilled = [self._prefill(call.packet, call.shape) for call in plan.prefills]
        decode = plan.decode
        block = None if decode is None else self._decode(decode.packet, decode.shape)
        return Flight(
            plan=plan, version=self.version, began=began, prefilled=prefilled, block=block
        )

    def _read(self, flight: Flight) -> Results:
        prefilled, block = jax.device_get((flight.prefilled, flight.block))
        return Results(
            plan=flight.plan,
            routes=tuple(routes for routes, _ in prefilled),
            scores=tuple(told for _, told in prefilled),
            block=block,
            version=flight.version,
            began=flight.began,
            ended=time.monotonic(),
        )

    def _prefill(self, packet: np.ndarray, shape: PrefillShape) -> tuple[Any, Any]:
        args: dict[str, Any] = {
            "cfg": self._cfg,
            "shape": shape,
            "attention": self._attention,
            "routes": self._rollout.routes,
            "mesh": mesh_of(self._weights),
        }
        state, scores = (self._weights, self._pool, self._drafter, packet), None
        if shape.scored:
            top = self._rollout.prompt_logprobs
            self._pool, self._drafter, routes, scores = scoring.prefill(*state, top=top, **args)
        else:
            self._pool, self._drafter, routes = programs.prefill(*state, **args)
        return routes, scores

    def _decode(self, packet: np.ndarray, shape: DecodeShape) -> Sampled:
        if shape.shaped:
            rollout = self._rollout
            self._pool, self._slots, result = shaped_programs.decode(
                self._weights,
                self._pool,
                self._slots,
                packet,
                cfg=self._cfg,
                shape=shape,
                told=Told(top=rollout.top_logprobs, support=rollout.support),
                attention=self._attention,
                routes=rollout.routes,
                mesh=mesh_of(self._weights),
            )
            return result
        self._pool, self._slots, self._drafter, result = programs.decode(
            self._weights,
            self._pool,
            self._slots,
            self._drafter,
            packet,
            cfg=self._cfg,
            shape=shape,
            attention=self._attention,
            routes=self._rollout.routes,
            mesh=mesh_of(self._weights),
        )
        return result

    def _copy(self, params: Any) -> Any:
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), params, self._layout
        )
        if self._rollout.store is not None:
            self.digest = fingerprint(placed)
        return jax.block_until_ready(
            programs.publish(
                placed,
                cfg=self._cfg,
                dtype=self._rollout.dtype,
                modules=self._rollout.modules,
            )
        )
