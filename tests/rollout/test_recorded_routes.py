"""Routes that leave the engine: those of every token fed, however it came to be fed."""

import asyncio
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import NARROW, SMALL, Digits, ask, prompt, serving

from forge_jax.attention.reference import reference_attention
from forge_jax.models.layout import init
from forge_jax.models.transformer import hidden
from forge_jax.rollout import programs
from forge_jax.rollout.cache import empty_pool
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.packets import decode_shapes, pack_decode
from forge_jax.rollout.slots import empty_slots
from forge_jax.types import Chunk, Finish, Request, Sampling

CFG = dataclasses.replace(SMALL, family="qwen3_moe", ffn=32, experts=8, experts_per_token=2)
ROLLOUT = dataclasses.replace(NARROW, context=32, routes=True, prompt_logprobs=0)
LENGTH = 10  # of a prompt
STOPS = tuple("0123456789")  # of texts in which every token is three digits


@pytest.fixture(scope="module")
def params() -> Any:
    return init(CFG, jax.random.key(0))


@pytest.fixture
def engine(params: Any) -> Iterator[RolloutEngine]:
    with ThreadPoolExecutor(1) as device:
        yield RolloutEngine(CFG, params, (), ROLLOUT, Digits(), device)


@partial(jax.jit, static_argnames="cfg")
def _experts(params: Any, tokens: Any, cfg: Any) -> Any:
    order = jnp.arange(len(tokens))

    def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
        ends = jnp.full(len(tokens), len(tokens))
        return reference_attention(q, k, v, order, order, ends, q.shape[-1] ** -0.5)[0], cache

    return hidden(params, tokens, order, attend, cfg)[2].experts


def chosen(params: Any, tokens: np.ndarray) -> np.ndarray:
    """int[T, layers, k]: the experts of tokens that are read all at once, in order of number."""
    padded = np.zeros(ROLLOUT.context, np.int32)
    padded[: len(tokens)] = tokens
    return np.sort(np.moveaxis(_experts(params, padded, CFG), 0, 1)[: len(tokens)])


def served(engine: RolloutEngine, *requests: Request) -> list[list[Chunk]]:
    """The chunks of requests that are made one after another."""

    async def all_of(request: Request) -> list[Chunk]:
        return [chunk async for chunk in engine.generate(request)]

    async def one_by_one() -> list[list[Chunk]]:
        async with serving(engine):
            return [await all_of(request) for request in requests]

    return asyncio.run(one_by_one())


def checked(params: Any, request: Request, chunks: list[Chunk]) -> np.ndarray:
    """The ids of a completion, all of whose routes are the model's."""
    ids = np.concatenate([chunk.ids for chunk in chunks])
    fed = np.concatenate([request.prompt, ids])[:-1]
    routes = [chunk.routes for chunk in chunks if chunk.routes is not None]
    np.testing.assert_array_equal(np.sort(np.concatenate(routes)), chosen(params, fed))
    return ids


@pytest.mark.parametrize("limit", [1, 3, 4, 11])
def test_every_token_but_the_last_has_its_routes(engine, params, limit) -> None:
    """Blocks have three steps: a completion ends inside one, at its end, and after several."""
    request = ask(prompt(limit, LENGTH), max_tokens=limit)
    [chunks] = served(engine, request)
    assert len(checked(params, request, chunks)) == limit
    assert chunks[-1].finish is Finish.LENGTH


def test_what_a_stop_text_cuts_off_has_none(engine, params) -> None:
    tokens = prompt(50, LENGTH)
    request = Request(prompt=tokens, sampling=Sampling(max_tokens=9, seed=3, stop=STOPS))
    [chunks] = served(engine, request)
    assert chunks[-1].finish is Finish.STOP
    assert len(checked(params, request, chunks)) == 1


def test_tokens_that_another_request_computed_have_theirs(engine, params) -> None:
    """Later requests read two pages of the first one, whose prompt is scored, the last of them no
    more than that."""
    first = ask(prompt(60, LENGTH), max_tokens=8, prompt_logprobs=0)
    again = [ask(first.prompt[:length], max_tokens=4) for length in (LENGTH, LENGTH - 1)]
    chunks, *others = served(engine, first, *again)
    checked(params, first, chunks)
    for request, found in zip(again, others, strict=True):
        assert found[0].cached_tokens == 2 * ROLLOUT.page
        checked(params, request, found)


def test_what_leaves_the_device_is_one_packet_where_no_routes_are_asked_for(params) -> None:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pool = empty_pool(CFG, ROLLOUT.pool_pages, ROLLOUT.page, np.float32, where)
    shape = decode_shapes(ROLLOUT)[0]
    decode = partial(programs.decode.__wrapped__, cfg=CFG, shape=shape)
    weights = jax.eval_shape(partial(programs.publish, cfg=CFG), params)
    slots, packet = empty_slots(ROLLOUT.slots), pack_decode([], [], shape, ROLLOUT)
    *_, sampled = jax.eval_shape(decode, weights, pool, slots, None, packet)
    assert sampled.routes is None
    assert sampled.packet.shape == (shape.steps, 1, shape.rows, 4)
