"""Completions that belong to a grammar, through the engine and into the trainer's log-probs."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Coroutine
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from small_engine import (
    BYTES,
    SMALL,
    Completion,
    ask,
    complete,
    idle_engine,
    prompt,
    served,
    serving,
    teacher_logits,
    weights,
)

from forge_jax.config import RolloutConfig
from forge_jax.drawing import CLOSED, LOST, joined
from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, ChatFormat
from forge_jax.rl.logprob import edge_logprob
from forge_jax.rl.supports import to_device
from forge_jax.rollout.disaggregated import DisaggregatedEngine
from forge_jax.rollout.router.live import Router, RouterConfig
from forge_jax.types import Finish, Grammar, Refused, Request

END = 258
ROLLOUT = RolloutConfig(
    slots=8, context=128, page=16, pages=14, chunk=32, decode_steps=4, deterministic=True,
    shaping=True, top_logprobs=3, support=48,
)  # fmt: skip
INNER = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "green", None]}},
    "required": ["on"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 4},
        "parts": {"type": "array", "items": INNER, "maxItems": 2},
    },
    "required": ["id", "name", "parts"],
    "additionalProperties": False,
}
REGEX = r"(ab|[c-e]){2,9}-[0-9]{2}"
JSON = Grammar(kind="json", text=json.dumps(SCHEMA))
CHOICE = Grammar(kind="choice", text='["yes", "no", "no idea"]')
GRAMMARS = [JSON, Grammar(kind="regex", text=REGEX), CHOICE]


def engine(**changes: Any) -> Any:
    return served(dataclasses.replace(ROLLOUT, **changes), stop_ids=(END,))


def asked(seed: int, grammar: Grammar | None, length: int = 9, **settings: Any) -> Request:
    settings = {"max_tokens": 110, "temperature": 1.5, "seed": seed, **settings}
    return ask(prompt(seed, length), grammar=grammar, **settings)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def text(out: Completion) -> str:
    return bytes(out.ids[:-1]).decode()


def check_belongs(out: Completion, grammar: Grammar) -> None:
    """A completion that has ended is a text of its grammar."""
    if out.finish is Finish.LENGTH:
        return
    assert out.ids[-1] == END
    if grammar == JSON:
        jsonschema.validate(json.loads(text(out)), SCHEMA)
    elif grammar == CHOICE:
        assert text(out) in json.loads(CHOICE.text)
    else:
        assert re.fullmatch(REGEX, text(out))


def test_completions_belong_to_their_grammars() -> None:
    requests = [asked(i, GRAMMARS[i % 3]) for i in range(18)]
    requests += [asked(20 + i, JSON, top_k=3, presence_penalty=1.0) for i in range(2)]
    requests += [asked(30 + i, CHOICE, min_tokens=9, temperature=0.0) for i in range(2)]
    requests += [asked(40 + i, JSON, choice=i) for i in range(3)]

    async def all_of() -> list[Completion]:
        async with engine() as up:
            return await asyncio.gather(*(complete(up, request) for request in requests))

    found = run(all_of())
    for request, out in zip(requests, found, strict=True):
        check_belongs(out, request.sampling.grammar)
    ended = [out.finish is Finish.STOP for out in found]
    assert sum(ended) > 18
    assert len({text(out) for out in found[-3:]}) == 3


def test_a_trainer_finds_the_log_probs_of_what_was_drawn() -> None:
    async def chunks() -> list:
        async with engine() as up:
            return [chunk async for chunk in up.generate(asked(3, JSON))]

    found = run(chunks())
    ids, logprobs = (np.concatenate([getattr(c, n) for c in found]) for n in ("ids", "logprobs"))
    support = joined([chunk.support for chunk in found])
    kept = support.kind != LOST
    assert 10 < kept.sum() < len(ids)  # within a string there is too much to choose from
    z = teacher_logits(weights(), [*prompt(3, 9).tolist(), *ids.tolist()], ROLLOUT.context)[8:-1]

    def trainer(z: Any) -> Any:
        count = kept.sum()
        logp, _ = edge_logprob(
            z, jnp.eye(SMALL.vocab), jnp.arange(count), jnp.asarray(ids[kept]),
            jnp.full(count, 1.5), support=to_device(support.at(kept)),
        )  # fmt: skip
        return logp

    np.testing.assert_allclose(trainer(jnp.asarray(z[kept])), logprobs[kept], atol=1e-5)
    alone = (support.kind == CLOSED) & ((support.ids >= 0).sum(-1) == 1)
    assert alone.sum() > 10
    assert (logprobs[alone] == 0).all()
    gradient = jax.grad(lambda z: trainer(z).sum())(jnp.asarray(z[kept]))
    assert (gradient[alone[kept]] == 0).all()
    assert (gradient[~alone[kept]] != 0).any(axis=-1).all()


def test_neighbours_and_interruptions_change_nothing() -> None:
    plain = [asked(i, None, max_tokens=60) for i in range(3)]
    requests = [*plain, *(asked(i, GRAMMARS[i % 3]) for i in range(5))]

    async def everywhere() -> list[list[Completion]]:
        async with engine() as up:
            together = await asyncio.gather(*(complete(up, request) for request in requests))
            assert up.stats()["preemptions"] > 0  # the pool holds two or three of them
            alone = [await complete(up, request) for request in requests]
        async with engine(update="recompute") as up:
            running = [asyncio.create_task(complete(up, request)) for request in requests]
            for version in range(1, 4):
                while up.stats()["tokens_sampled"] < 20 * version:
                    await asyncio.sleep(0)
                await up.swap(version, weights())
            updated = await asyncio.gather(*running)
            assert {v for out in updated for v in out.versions} > {0}
        return [together, alone, updated]

    for each in zip(*run(everywhere()), strict=True):
        assert len({tuple(out.ids) for out in each}) == 1


def test_a_router_and_engines_that_share_the_work_follow_grammars() -> None:
    requests = [asked(i, GRAMMARS[i % 3], length=40, max_tokens=80) for i in range(6)]
    options: dict[str, Any] = {"rollout": ROLLOUT, "stop_ids": (END,)}

    async def of(up: Any) -> list[Completion]:
        async with serving(up):
            return await asyncio.gather(*(complete(up, request) for request in requests))

    async def everywhere() -> list[list[Completion]]:
        async with served(**options) as one:
            found = [await asyncio.gather(*(complete(one, request) for request in requests))]
        async with idle_engine(**options) as a, idle_engine(**options) as b:
            found.append(await of(Router({"a": a, "b": b}, ROLLOUT, RouterConfig())))
        async with idle_engine(**options) as a, idle_engine(**options) as b:
            found.append(await of(DisaggregatedEngine([a], [b], ROLLOUT)))
        return found

    for each in zip(*run(everywhere()), strict=True):
        assert len({tuple(out.ids) for out in each}) == 1


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"key": {"enum": ["k1", "k2"]}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}
FIND = {"type": "function", "function": {**LOOK["function"], "name": "find"}}
PLAIN = ChatFormat(template="{{ messages[-1].content }}", end_of_turn="<|im_end|>")


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


async def through_the_client(client: AsyncOpenAI) -> None:
    chat, hot = client.chat.completions.create, {"model": "m", "temperature": 1.3}
    hot |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": INNER}}
    answer = await chat(response_format=wanted, seed=1, n=3, **hot)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), INNER)
    several = {"tools": [LOOK, FIND], "parallel_tool_calls": False}
    either = {"look", "find"}
    for tool_choice, names in (("required", either), (named("look"), {"look"})):
        answer = await chat(tool_choice=tool_choice, seed=1, **several, **hot)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments)["key"] in ("k1", "k2")
        assert call.function.name in names
    stream = await chat(tool_choice=named("find"), stream=True, seed=0, **several, **hot)
    deltas = [delta async for delta in stream]
    calls = [c for d in deltas for choice in d.choices for c in choice.delta.tool_calls or ()]
    assert [c.function.name for c in calls if c.function.name] == ["find"]
    arguments = "".join(c.function.arguments or "" for c in calls)
    assert json.loads(arguments)["key"] in ("k1", "k2")
    raw = client.completions.create
    for extra in ({"guided_regex": REGEX}, {"structured_outputs": {"regex": REGEX}}):
        answer = await raw(model="m", prompt="x", max_tokens=60, seed=2, extra_body=extra)
        assert re.fullmatch(REGEX, answer.choices[0].text)
    cut = await raw(model="m", prompt="x", max_tokens=4, extra_body={"guided_json": SCHEMA})
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(BadRequestError, match="Unimplemented keys") as refused:
        await raw(model="m", prompt="x", extra_body={"guided_json": {"if": {}}})
    assert refused.value.param == "guided_json"


def test_the_official_client_gets_what_it_asks_for() -> None:
    async def test() -> None:
        async with engine() as up:
            gateway = Gateway(up, Chat(tokenizer=BYTES, format=PLAIN), "m", "key", GatewayConfig())
            async with (
                gateway.running() as url,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
            ):
                await through_the_client(client)

    run(test())


def test_what_cannot_be_followed_is_refused_and_no_one_else_is() -> None:
    broken = Grammar(kind="regex", text="(", source="guided_regex")
    endless = Grammar(kind="regex", text="ab\nc", source="structured_outputs.regex")

    async def refusal(up: Any, grammar: Grammar) -> Refused:
        with pytest.raises(Refused) as refused:
            await complete(up, asked(0, grammar))
        return refused.value

    async def refusals() -> list[Refused]:
        async with served(ROLLOUT, stop_ids=(ord("\n"),)) as up:
            beside = asyncio.create_task(complete(up, asked(1, None, max_tokens=30)))
            found = [await refusal(up, grammar) for grammar in (broken, endless)]
            assert (await beside).finish is not Finish.ABORT
        async with engine(shaping=False, top_logprobs=0) as up:
            found.append(await refusal(up, dataclasses.replace(JSON, source="guided_json")))
        # Whoever waits for the only slot gets it.
        async with served(dataclasses.replace(ROLLOUT, slots=1), stop_ids=(ord("\n"),)) as up:
            calls = [asyncio.create_task(complete(up, asked(0, None, 1, max_tokens=99)))]
            calls.append(asyncio.create_task(complete(up, asked(1, endless, 1))))
            while not (up.stats()["requests_running"] and up.stats()["requests_waiting"]):
                await asyncio.sleep(0.001)
            calls.append(asyncio.create_task(complete(up, asked(2, None, 1))))
            ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
            assert [isinstance(end, Refused) for end in ended] == [False, True, False]
        return found

    found = run(refusals())
    assert [refused.status for refused in found] == [400] * 3
    sources = ("guided_regex: ", "structured_outputs.regex: ", "guided_json needs an engine")
    for refused, said in zip(found, sources, strict=True):
        assert str(refused).startswith(said)


def test_a_completion_may_be_cut_and_is_not_made_to_go_on() -> None:
    async def cut() -> Completion:
        async with engine() as up:
            return await complete(up, asked(5, JSON, max_tokens=7))

    out = run(cut())
    assert (len(out.ids), out.finish) == (7, Finish.LENGTH)
    with pytest.raises(ValueError, match="ignore_eos"):
        asked(0, JSON, ignore_eos=True)
    with pytest.raises(ValueError, match="kind='yaml'"):
        Grammar(kind="yaml", text="")
