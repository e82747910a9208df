"""Routes that leave the engine: one for each token fed, however a completion ends."""

from functools import partial

import jax
import numpy as np
import pytest
from small_engine import SMALL, Digits, ask

from forge_jax.config import RolloutConfig
from forge_jax.models.layout import layout, unstack
from forge_jax.rollout import programs
from forge_jax.rollout.cache import empty_cache
from forge_jax.rollout.jobs import Job, Limits, row_of
from forge_jax.rollout.packets import EXHAUSTED, GOES_ON, IDLE, STOPPED, Sampled
from forge_jax.rollout.scheduler import Results, Scheduler
from forge_jax.rollout.stop import StopStrings
from forge_jax.trees import is_param
from forge_jax.types import Finish

CFG = RolloutConfig(slots=2, context=32, prefill_rows=2, decode_steps=3, routes=True)
PROMPT = 5


def recorded(statuses: list[int], stop: str | None = None, limit: int = 9):
    """The chunks of a request; token n is n, and the tokens fed have the routes 0, 1, 2, ..."""
    scheduler, number = Scheduler(CFG), 7
    limits = Limits(context=CFG.context, vocab=264, stop_ids=())
    row = row_of(ask(np.arange(PROMPT), max_tokens=limit), limits, (0, 0))
    watch = None if stop is None else StopStrings((stop,), Digits())
    scheduler.submit(Job(number, row, watch, 0.0))
    chunks, fed = [], 0
    statuses, tokens = list(statuses), iter(range(99))

    def packet() -> np.ndarray:
        status = statuses.pop(0) if statuses else IDLE
        return np.array([next(tokens), 0, status], np.int32)

    while (plan := scheduler.plan()) is not None:
        firsts = []
        for rows in plan.admitted:
            routes = np.full((CFG.prefill_rows, 16, 2, 1), 99, np.int8)
            routes[0, :PROMPT] = np.arange(PROMPT)[:, None, None]
            packets = np.zeros((CFG.prefill_rows, 3), np.int32)
            packets[0], fed = packet(), PROMPT
            assert [job.number for _, job in rows] == [number]
            firsts.append(Sampled(packets, routes))
        block = None
        if plan.decode:
            slot = next(i for i, job in enumerate(plan.owners) if job is not None)
            packets = np.zeros((CFG.decode_steps, CFG.slots, 3), np.int32)
            routes = np.full((CFG.decode_steps, CFG.slots, 2, 1), 99, np.int8)
            for step in range(CFG.decode_steps):
                packets[step, slot], routes[step, slot] = packet(), fed
                fed += 1
            block = Sampled(packets, routes)
        results = Results(plan=plan, firsts=tuple(firsts), block=block, version=0, began=0.0)
        chunks += [chunk for _, chunk in scheduler.apply(results)]
    return chunks


@pytest.mark.parametrize(
    ("statuses", "stop", "limit", "sampled", "finish"),
    [
        ([EXHAUSTED], None, 1, 1, Finish.LENGTH),
        ([STOPPED], None, 9, 1, Finish.STOP),
        ([GOES_ON, STOPPED], None, 9, 2, Finish.STOP),
        ([GOES_ON] * 3 + [STOPPED], None, 9, 4, Finish.STOP),
        ([GOES_ON] * 4 + [STOPPED], None, 9, 5, Finish.STOP),
        ([GOES_ON] * 8 + [EXHAUSTED], None, 9, 9, Finish.LENGTH),
        ([GOES_ON] * 8 + [EXHAUSTED], "000", 9, 1, Finish.STOP),
        ([GOES_ON] * 8 + [EXHAUSTED], "002", 9, 3, Finish.STOP),
        ([GOES_ON] * 8 + [EXHAUSTED], "003004", 9, 5, Finish.STOP),
    ],
)
def test_every_token_but_the_last_has_a_route(statuses, stop, limit, sampled, finish) -> None:
    chunks = recorded(statuses, stop, limit)
    assert chunks[-1].finish is finish
    assert sum(len(chunk.ids) for chunk in chunks) == sampled
    routes = np.concatenate([chunk.routes for chunk in chunks])
    np.testing.assert_array_equal(routes[:, 0, 0], np.arange(PROMPT + sampled - 1))


def test_what_leaves_the_device_is_one_packet_where_no_routes_are_asked_for() -> None:
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, np.float32), layout(SMALL), is_leaf=is_param
    )
    params = jax.eval_shape(partial(unstack, cfg=SMALL), params)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    cache = empty_cache(SMALL, CFG.slots, CFG.context, np.float32, device)
    slots = programs.empty_slots(CFG.slots)
    decode = partial(programs.decode.__wrapped__, cfg=SMALL, steps=2)
    *_, sampled = jax.eval_shape(decode, params, cache, slots)
    assert sampled.routes is None
    assert sampled.packet.shape == (2, CFG.slots, 3)
