"""An engine elsewhere is told all that is asked, and tells what our own engine would."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_engine import (
    BYTES,
    SMALL,
    Digits,
    ask,
    complete,
    log_softmax,
    prompt,
    serving,
    teacher_logits,
    weights,
)
from stand_in_engines import SlowDevice, StandIn, standing

from forge_jax.config import ExternalConfig, RolloutConfig, UserError
from forge_jax.drawing import JSON_SCHEMA, LOST, OPEN, Grammar, Sampling
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.external.dialect import Ask, check_served
from forge_jax.rollout.external.engine import DIALECTS, ExternalEngine
from forge_jax.rollout.external.published import Folder
from forge_jax.types import Finish, Refused

CFG = RolloutConfig(
    slots=4, context=64, page=8, chunk=32, decode_steps=2, shaping=True, top_logprobs=3
)
STOPS = (7, 9)
KINDS = pytest.mark.parametrize("kind", list(DIALECTS))


@asynccontextmanager
async def pair(
    kind: str, folder: Path | None = None, tokenizer: Any = BYTES, **cfg: Any
) -> AsyncIterator[tuple[ExternalEngine, StandIn, RolloutEngine]]:
    """An external engine, the stand-in that it talks to, and the engine behind that."""
    async with AsyncExitStack() as stack:
        device = stack.enter_context(SlowDevice(1))
        trainer = stack.enter_context(ThreadPoolExecutor(1))
        behind = RolloutEngine(SMALL, weights(), STOPS, CFG, tokenizer, device)
        await stack.enter_async_context(serving(behind))
        stand_in, url = await stack.enter_async_context(standing(behind, CFG.context, device))
        external = ExternalEngine(
            kind, url, ExternalConfig(**cfg), context=None, stop_ids=STOPS, tokenizer=tokenizer,
            folder=None if folder is None else Folder(folder, SMALL, None, trainer),
        )  # fmt: skip
        await external.warm_up()
        await stack.enter_async_context(serving(external))
        yield external, stand_in, behind
        assert external.stats()["requests_running"] == 0
        assert behind.stats()["requests_running"] == 0


@KINDS
def test_what_comes_over_the_wire_is_what_the_engine_samples(kind: str) -> None:
    asked = [
        {"seed": 5, "max_tokens": 20},
        {"seed": 6, "max_tokens": 30, "temperature": 0.5, "stop_ids": (3, 4)},
        {"seed": 2**64 - 3, "max_tokens": 25, "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 10},
        *({"seed": seed, "stop": ("1", "0")} for seed in range(20, 26)),  # anywhere in a chunk
        {"seed": 9, "max_tokens": 12, "top_k": 5, "min_p": 0.01, "min_tokens": 4},
        {"seed": 10, "max_tokens": 12, "logit_bias": ((5, 3.0), (6, -100.0))},
        {"seed": 11, "max_tokens": 9, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    ]

    async def run() -> None:
        async with pair(kind, tokenizer=Digits()) as (external, _, behind):
            for number, sampling in enumerate(asked):
                request = ask(prompt(number, 5 + number), **sampling)
                told, want = await complete(external, request), await complete(behind, request)
                assert told.ids == want.ids
                assert (told.finish, told.stop_text) == (want.finish, want.stop_text)
                np.testing.assert_allclose(told.logprobs, want.logprobs, atol=1e-5)

    asyncio.run(run())


@KINDS
def test_likeliest_tokens_and_supports(kind: str) -> None:
    async def run() -> None:
        async with pair(kind) as (external, _, behind):
            request = ask(
                prompt(1, 6), seed=3, max_tokens=8, top_logprobs=3, logit_bias=((5, 2.0),)
            )
            told = [chunk async for chunk in external.generate(request)]
            want = [chunk async for chunk in behind.generate(request)]
            for name in ("top_ids", "top_logprobs"):
                got, right = (
                    np.concatenate([getattr(c, name) for c in chunks]) for chunks in (told, want)
                )
                np.testing.assert_allclose(got, right, atol=1e-5)
            support = told[0].support
            assert support is not None
            assert set(support.kind) == {OPEN}
            assert (support.ids[0, 0], support.offsets[0, 0]) == (5, 2.0)
            cut = ask(prompt(1, 6), seed=3, max_tokens=8, top_p=0.9)
            for chunk in [chunk async for chunk in external.generate(cut)]:
                assert chunk.support is not None
                assert set(chunk.support.kind) <= {LOST}

    asyncio.run(run())


@KINDS
@pytest.mark.parametrize("update", ["recompute", "wait", "abort"])
def test_new_weights_in_the_middle(kind: str, update: str, tmp_path: Path) -> None:
    """Every token has the version of the weights that it is likely under."""
    tokens = [prompt(n, 5 + n) for n in range(3)]
    params = [weights(0), weights(1)]

    async def run() -> None:
        async with pair(kind, tmp_path, update=update) as (external, stand_in, _):
            requests = [ask(t, seed=1, max_tokens=40, ignore_eos=True) for t in tokens]
            tasks = [asyncio.create_task(complete(external, request)) for request in requests]
            await stand_in.slowed(0.02 if update == "wait" else 0.2, 3)
            await external.swap(1, params[1])
            told = await asyncio.gather(*tasks)
            after = await complete(external, requests[0])
            assert set(after.versions) == {1}
            assert stand_in.calls[0] == "pause"
            assert stand_in.calls[-1] == "resume"
        assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]
        for prefix, out in zip(tokens, told, strict=True):
            assert out.versions == sorted(out.versions)
            seen = set(out.versions)
            assert seen == ({0, 1} if update == "recompute" else {0})
            assert out.finish is (Finish.ABORT if update == "abort" else Finish.LENGTH)
            assert len(out.ids) == 40 or update == "abort"
            for version in seen:
                fed = [*prefix.tolist(), *out.ids]
                rows = teacher_logits(params[version], fed, CFG.context)[len(prefix) - 1 : -1]
                want = log_softmax(rows)[np.arange(len(out.ids)), out.ids]
                at = np.array(out.versions) == version
                np.testing.assert_allclose(out.logprobs[at], want[at], atol=1e-4)

    asyncio.run(run())


@KINDS
def test_what_cannot_be_asked_for_anew_ends_at_an_update(kind: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(kind, tmp_path) as (external, stand_in, _):
            request = ask(prompt(0, 5), seed=1, presence_penalty=0.5, ignore_eos=True)
            task = asyncio.create_task(complete(external, request))
            await stand_in.slowed(0.2, 1)
            await external.swap(1, weights(1))
            assert (await task).finish is Finish.ABORT

    asyncio.run(run())


@KINDS
def test_closing_ends_the_request_there(kind: str) -> None:
    async def run() -> None:
        async with pair(kind) as (external, stand_in, behind):
            stand_in.device.seconds = 0.05
            chunks = external.generate(ask(prompt(0, 5), seed=1, ignore_eos=True))
            async with aclosing(chunks):
                await anext(chunks)
            while behind.stats()["requests_running"]:
                await asyncio.sleep(0.01)

    asyncio.run(run())


CHANGED = {
    "temperature": 0.5, "max_tokens": 3, "seed": 4, "choice": 1, "stop_ids": (5,),
    "ignore_eos": True, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logit_bias": ((1, 1.0),),
    "min_tokens": 2, "top_logprobs": 2, "prompt_logprobs": 1,
    "grammar": Grammar(kind=JSON_SCHEMA, text='{"type": "null"}'),
}  # fmt: skip


@KINDS
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Sampling)])
def test_no_setting_is_dropped(kind: str, name: str) -> None:
    """The engine is asked for something else, or the caller is told which setting is at fault."""
    if name == "stop":
        return  # watched for here, as the test of what comes over the wire sees

    def body(sampling: Sampling) -> dict[str, Any]:
        ask = Ask(
            prompt=prompt(0, 4), sampling=sampling, model="m", stretch=0,
            max_tokens=sampling.max_tokens or 9, min_tokens=sampling.min_tokens,
            stop_ids=sampling.stop_ids,
        )  # fmt: skip
        return DIALECTS[kind].body(ask)

    plain = Sampling(seed=1)
    changed = dataclasses.replace(plain, **{name: CHANGED[name]})
    if name == "prompt_logprobs":
        with pytest.raises(Refused) as caught:
            body(changed)
        assert (caught.value.status, caught.value.param) == (400, name)
    else:
        assert body(changed) != body(plain)


def test_a_thought_that_has_to_end_first_is_refused() -> None:
    grammar = Grammar(kind=JSON_SCHEMA, text="{}", source="response_format")
    for opening, refused in (("", True), ("<think>", False)):
        thinks = dataclasses.replace(grammar, thought=(opening, "</think>"))
        with pytest.raises(Refused) if refused else nullcontext():
            check_served(Sampling(grammar=thinks), (JSON_SCHEMA,))


@KINDS
@pytest.mark.parametrize(
    ("wrong", "said"), [("raw", "not under the temperature"), ("deaf", "external.seeds=true")]
)
def test_an_engine_that_tells_something_else_is_refused(kind: str, wrong: str, said: str) -> None:
    async def run() -> None:
        async with pair(kind) as (external, stand_in, _):
            setattr(stand_in, wrong, True)
            with pytest.raises(UserError, match=said):
                await external.warm_up()

    asyncio.run(run())


@KINDS
def test_too_long_is_refused_here(kind: str) -> None:
    async def run() -> None:
        async with pair(kind) as (external, stand_in, _):
            before = len(stand_in.bodies)
            with pytest.raises(Refused) as caught:
                await complete(external, ask(prompt(0, CFG.context)))
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
            assert len(stand_in.bodies) == before

    asyncio.run(run())
