"""Requests that change their logits, through the engine and into the trainer's log-probs."""

import asyncio
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    NARROW,
    SMALL,
    WIDE,
    ask,
    idle_engine,
    log_softmax,
    prompt,
    served,
    serving,
    teacher_logits,
    weights,
)

from forge_jax.drawing import COLDEST, HOTTEST, LOST, REPETITION, joined
from forge_jax.rl.logprob import edge_logprob
from forge_jax.rl.supports import to_device
from forge_jax.rollout import programs
from forge_jax.types import Chunk, Refused, Request

SHAPED = dataclasses.replace(WIDE, shaping=True, top_logprobs=3, support=48)
SETTINGS = {
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.2},
    "bias": {"logit_bias": ((7, 3.0), (9, -100.0))},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "all": {"top_k": 9, "top_p": 0.9, "presence_penalty": 2.0, "logit_bias": ((3, 2.0),)},
}


async def chunks_of(engine, request: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def joint(chunks: list[Chunk], name: str) -> np.ndarray:
    return np.concatenate([getattr(chunk, name) for chunk in chunks])


def test_a_trainer_finds_the_log_probs_of_what_was_drawn() -> None:
    async def run() -> list[list[Chunk]]:
        async with served(SHAPED) as engine:
            requests = [
                ask(prompt(i, 9), seed=i, max_tokens=12, **settings)
                for i, settings in enumerate(SETTINGS.values())
            ]
            return await asyncio.gather(*(chunks_of(engine, request) for request in requests))

    found = asyncio.run(run())
    for i, (settings, chunks) in enumerate(zip(SETTINGS.values(), found, strict=True)):
        ids, logprobs = joint(chunks, "ids"), joint(chunks, "logprobs")
        z = teacher_logits(weights(), [*prompt(i, 9).tolist(), *ids.tolist()])[8:-1]
        support = joined([chunk.support for chunk in chunks])
        kept = support.kind != LOST
        assert kept.sum() > 6
        temperature = settings.get("temperature", 1.0)
        logp, _ = edge_logprob(
            jnp.asarray(z[kept]),
            jnp.eye(SMALL.vocab),
            jnp.arange(kept.sum()),
            jnp.asarray(ids[kept]),
            jnp.full(kept.sum(), temperature),
            support=to_device(support.at(kept)),
        )
        np.testing.assert_allclose(logp, logprobs[kept], atol=1e-5)
        raw = log_softmax(z)[np.arange(len(ids)), ids]
        np.testing.assert_allclose(joint(chunks, "raw"), raw, atol=1e-5)


def test_settings_do_not_touch_neighbours_nor_depend_on_them() -> None:
    async def alone_and_together() -> tuple[list, list, list]:
        requests = [ask(prompt(40, 9), seed=4, max_tokens=9)] + [
            ask(prompt(i, 9), seed=i, max_tokens=9, **settings)
            for i, settings in enumerate(SETTINGS.values())
        ]
        async with served(SHAPED) as engine:
            together = await asyncio.gather(*(chunks_of(engine, r) for r in requests))
            alone = [await chunks_of(engine, request) for request in requests]
        async with served(dataclasses.replace(NARROW, shaping=True, context=32)) as engine:
            crowded = await asyncio.gather(*(chunks_of(engine, r) for r in requests))
        return together, alone, crowded

    for each in zip(*asyncio.run(alone_and_together()), strict=True):
        ids = [joint(chunks, "ids").tolist() for chunks in each]
        assert ids[0] == ids[1] == ids[2]


def test_stop_ids_wait_for_min_tokens_and_top_log_probs_are_told() -> None:
    async def run() -> tuple[list[Chunk], list[Chunk]]:
        stops = tuple(range(0, 256, 20))
        async with served(SHAPED, stop_ids=stops) as engine:
            bias = ((20, 50.0),)
            at_once = ask(prompt(1, 5), seed=1, max_tokens=20, logit_bias=bias)
            later = ask(
                prompt(1, 5), seed=1, max_tokens=20, logit_bias=bias, min_tokens=7, top_logprobs=2
            )
            return await chunks_of(engine, at_once), await chunks_of(engine, later)

    at_once, later = asyncio.run(run())
    assert joint(at_once, "ids").tolist() == [20]
    assert len(joint(later, "ids")) == 8
    top, logprobs = joint(later, "top_ids"), joint(later, "top_logprobs")
    assert top.shape == logprobs.shape == (8, 2)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    chosen = top[:, 0] == joint(later, "ids")
    np.testing.assert_allclose(logprobs[chosen, 0], joint(later, "logprobs")[chosen], atol=1e-6)


def test_everything_is_compiled_before_the_first_request() -> None:
    async def run() -> None:
        async with idle_engine(dataclasses.replace(NARROW, shaping=True)) as engine:
            await engine.warm_up()
            before = programs.traces.total()
            async with serving(engine):
                await chunks_of(engine, ask(prompt(0, 5), seed=0, max_tokens=5, top_k=3))
            assert programs.traces.total() == before

    asyncio.run(run())


@pytest.mark.parametrize(
    ("rollout", "settings", "named"),
    [
        (WIDE, {"top_p": 0.5}, "top_p needs .*rollout.shaping"),
        (SHAPED, {"top_logprobs": 4}, "top_logprobs=4"),
        (SHAPED, {"logit_bias": ((264, 1.0),)}, "264"),
    ],
)
def test_what_the_engine_was_not_made_for_is_refused(rollout, settings: dict, named: str) -> None:
    async def run() -> None:
        async with served(rollout) as engine:
            with pytest.raises(Refused, match=named) as refused:
                await chunks_of(engine, ask(prompt(0, 5), **settings))
            assert refused.value.status == 400

    asyncio.run(run())


def test_what_may_be_asked_for_is_drawn_with_finite_log_probs() -> None:
    """At both ends of what a temperature and a repetition penalty may be."""

    async def run() -> None:
        async with served(SHAPED) as engine:
            for repetition in (1.0, *REPETITION):
                requests = [
                    ask(prompt(2, 7), seed=3, max_tokens=9, temperature=temperature,
                        repetition_penalty=repetition, **more)
                    for temperature in (COLDEST, HOTTEST)
                    for more in ({}, {"top_p": 1e-300}, {"min_p": 1e-300}, {"top_k": 1})
                ]  # fmt: skip
                for chunks in await asyncio.gather(*(chunks_of(engine, r) for r in requests)):
                    assert np.isfinite(joint(chunks, "logprobs")).all()

    asyncio.run(run())
