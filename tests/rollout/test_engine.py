"""Laws of one request: what it gets depends on itself alone and is what the model says."""

import asyncio
import dataclasses

import numpy as np
import pytest
from small_engine import (
    SMALL,
    WIDE,
    Digits,
    ask,
    complete,
    prompt,
    served,
    teacher_logits,
    teacher_logprobs,
    weights,
)

from forge_jax.types import Finish, Refused


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_are_those_of_the_whole_sequence_read_at_once(temperature: float) -> None:
    async def run() -> None:
        async with served() as engine:
            prompts = [prompt(i, 1 + 5 * i) for i in range(6)]
            asked = [ask(p, seed=i, temperature=temperature) for i, p in enumerate(prompts)]
            done = await asyncio.gather(*(complete(engine, request) for request in asked))
        for tokens, out in zip(prompts, done, strict=True):
            assert out.finish is Finish.LENGTH
            assert len(tokens) + len(out.ids) == WIDE.context
            want = teacher_logprobs(weights(), tokens, out.ids, temperature)
            np.testing.assert_allclose(out.logprobs, want, atol=1e-4)

    asyncio.run(run())


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_gets_the_same_alone_and_among_31_others(deterministic: bool) -> None:
    """Whatever the slot, the row of the prefill, the neighbours and their number: the same bits
    in deterministic mode, else the same but for rounding."""
    request = ask(prompt(0, 9), seed=11, max_tokens=20)
    shapes = dataclasses.replace(WIDE, deterministic=deterministic)

    async def run() -> None:
        async with served(shapes) as engine:
            alone = await complete(engine, request)
            for before in (0, 5, 18, 31):
                mates = [
                    ask(prompt(i, 1 + i % 31), seed=i if i % 2 else None, temperature=i % 3 / 2)
                    for i in range(100, 131)
                ]
                group = [*mates[:before], request, *mates[before:]]
                done = await asyncio.gather(*(complete(engine, r) for r in group))
                assert done[before].ids == alone.ids
                difference = np.abs(done[before].logprobs - alone.logprobs).max()
                assert difference <= (0 if deterministic else 1e-5)

    asyncio.run(run())


def test_choices_differ_and_repeat_as_a_set() -> None:
    async def run() -> None:
        async with served() as engine:

            async def choices() -> list[tuple[int, ...]]:
                asked = [ask(prompt(0, 9), seed=3, choice=i, max_tokens=12) for i in range(6)]
                return [
                    tuple(c.ids)
                    for c in await asyncio.gather(*(complete(engine, r) for r in asked))
                ]

            first = await choices()
            assert len(set(first)) == 6
            assert await choices() == first

    asyncio.run(run())


def test_requests_without_a_seed_differ_and_repeat_with_the_engine() -> None:
    async def run() -> list[list[int]]:
        async with served() as engine:
            asked = [ask(prompt(0, 9), max_tokens=12) for _ in range(4)]
            return [(await complete(engine, request)).ids for request in asked]

    first = asyncio.run(run())
    assert len(set(map(tuple, first))) == 4
    assert asyncio.run(run()) == first


def test_a_token_depends_on_its_position_not_on_where_the_prompt_ends() -> None:
    async def run() -> None:
        async with served() as engine:
            whole = await complete(engine, ask(prompt(0, 6), seed=7, max_tokens=20))
            for cut in (1, 4, 9):
                tokens = np.concatenate([prompt(0, 6), np.array(whole.ids[:cut], np.int32)])
                rest = await complete(engine, ask(tokens, seed=7, max_tokens=20 - cut))
                assert rest.ids == whole.ids[cut:]

    asyncio.run(run())


def test_greedy_is_the_argmax_loop_with_logprob_zero() -> None:
    async def run() -> None:
        async with served() as engine:
            out = await complete(engine, ask(prompt(2, 7), temperature=0.0, max_tokens=15))
        tokens = prompt(2, 7).tolist()
        for token in out.ids:
            assert token == teacher_logits(weights(), tokens)[-1].argmax()
            tokens.append(token)
        assert not out.logprobs.any()

    asyncio.run(run())


def test_stop_ids_end_a_completion_and_are_kept() -> None:
    async def run() -> None:
        async with served() as engine:
            free = await complete(engine, ask(prompt(1, 5), seed=1, max_tokens=24))
        stop = free.ids[10]
        first = free.ids.index(stop)
        async with served(stop_ids=(stop,)) as engine:
            cut = await complete(engine, ask(prompt(1, 5), seed=1, max_tokens=24))
            assert (cut.ids, cut.finish) == (free.ids[: first + 1], Finish.STOP)
            other = await complete(engine, ask(prompt(1, 5), seed=1, stop_ids=(free.ids[0],)))
            assert (other.ids, other.finish) == (free.ids[:1], Finish.STOP)
            on = await complete(engine, ask(prompt(1, 5), seed=1, max_tokens=24, ignore_eos=True))
            assert (on.ids, on.finish) == (free.ids, Finish.LENGTH)

    asyncio.run(run())


@pytest.mark.parametrize("place", [0, 2, 3, 4, 9])
def test_a_stop_string_keeps_the_token_that_completes_it_and_nothing_after(place: int) -> None:
    """Every part of the text of three tokens, which `place` moves across the ends of chunks."""

    async def run() -> None:
        async with served(tokenizer=Digits()) as engine:
            free = await complete(engine, ask(prompt(5, 5), seed=4, max_tokens=16))
            text = "".join(Digits().piece(i).decode() for i in free.ids)
            here = text[3 * place : 3 * place + 9]
            stops = sorted({here[i:j] for i in range(9) for j in range(i + 1, 10)})
            asked = [ask(prompt(5, 5), seed=4, max_tokens=16, stop=("no", s)) for s in stops]
            done = await asyncio.gather(*(complete(engine, request) for request in asked))
        for stop, out in zip(stops, done, strict=True):
            end = -(-(text.index(stop) + len(stop)) // 3)
            assert out.ids == free.ids[:end]
            assert (out.finish, out.stop_text) == (Finish.STOP, stop)
            np.testing.assert_allclose(out.logprobs, free.logprobs[:end], atol=1e-5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "sampling", "code"),
    [
        ([], {}, None),
        ([SMALL.vocab], {}, None),
        ([3, -1], {}, None),
        ([1] * WIDE.context, {}, "context_length_exceeded"),
        ([1], {"seed": 2**64}, None),
        ([1], {"stop": ("",)}, None),
        ([1], {"stop_ids": tuple(range(17))}, None),
    ],
)
def test_what_cannot_be_served_is_refused(tokens: list, sampling: dict, code: str | None) -> None:
    async def run() -> None:
        async with served() as engine:
            with pytest.raises(Refused) as refused:
                await complete(engine, ask(np.array(tokens, np.int32), **sampling))
            assert (refused.value.status, refused.value.code) == (400, code)
            fits = await complete(engine, ask(np.ones(WIDE.context - 1, np.int32)))
            assert (len(fits.ids), fits.finish) == (1, Finish.LENGTH)

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [-1, 1e-8, 1e-300, 1e300, float("nan")])
def test_temperatures_that_floats_cannot_bear_are_none(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.* must be 0, or from 0.01 to 10000"):
        ask(prompt(2, 7), temperature=temperature)
