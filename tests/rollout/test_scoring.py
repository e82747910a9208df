"""Laws of a prompt's log-probs: what the trainer makes of the same tokens, however it was read."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    BYTES,
    SMALL,
    WIDE,
    ask,
    complete,
    idle_engine,
    log_softmax,
    prompt,
    served,
    serving,
    teacher_logits,
    weights,
)

from forge_jax.models.chat import built_in
from forge_jax.models.hf import export_folder
from forge_jax.models.layout import layout
from forge_jax.rl.logprob import edge_logprob
from forge_jax.rollout.disaggregated import DisaggregatedEngine
from forge_jax.rollout.packets import Scores
from forge_jax.rollout.router.live import Router, RouterConfig
from forge_jax.rollout.scoring import scored
from forge_jax.sharding import make_mesh, shardings
from forge_jax.types import Chunk, Engine, PromptLogprobs, Refused, Request

TOLD = dataclasses.replace(WIDE, slots=8, chunk=8, pages=14, prompt_logprobs=5)  # hardly any pages
PROMPTS = [prompt(i, n) for i, n in enumerate((1, 2, 8, 9, 17, 31))]


async def first_of(engine: Engine, request: Request) -> Chunk:
    chunks = [chunk async for chunk in engine.generate(request)]
    assert all(chunk.prompt is None for chunk in chunks[1:])
    return chunks[0]


async def told(engine: Engine, tokens: np.ndarray, top: int = 5, most: int = 3) -> Chunk:
    return await first_of(engine, ask(tokens, seed=1, prompt_logprobs=top, max_tokens=most))


@jax.jit
def trained(rows: Any, labels: Any) -> Any:
    """The trainer's log-probs of labels, given logits."""
    count = len(labels)
    edges = jnp.arange(count), labels, jnp.ones(count)
    return edge_logprob(rows, jnp.eye(rows.shape[1]), *edges)[0]


def check(found: PromptLogprobs | None, params: Any, tokens: np.ndarray, top: int = 5) -> None:
    assert found is not None
    count = len(tokens) - 1
    rows = np.zeros((TOLD.context, SMALL.vocab), np.float32)
    labels = np.zeros(TOLD.context, np.int32)
    rows[:count], labels[:count] = teacher_logits(params, tokens.tolist())[:-1], tokens[1:]
    assert len(found.logprobs) == count
    np.testing.assert_allclose(found.logprobs, trained(rows, labels)[:count], atol=1e-5)
    rows = rows[:count]
    order = np.argsort(-rows, axis=1, kind="stable")
    ranks = 1 + np.argmax(order == tokens[1:, None], axis=1)
    np.testing.assert_array_equal(found.ranks, ranks)
    np.testing.assert_array_equal(found.top_ids, order[:, :top])
    want = np.take_along_axis(log_softmax(rows), order[:, :top], axis=1)
    np.testing.assert_allclose(found.top_logprobs, want, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_scores_are_the_trainers_and_equally_likely_tokens_rank_by_their_ids(
    chunk: int | None,
) -> None:
    rng = np.random.default_rng(0)
    h, w = rng.normal(size=(7, 32)), rng.normal(size=(32, SMALL.vocab))
    w[:, 9] = w[:, 4]
    labels = np.array([4, 9, 0, 263, 9, 4, 7], np.int32)
    params = {**weights(), "unembed": jnp.asarray(w, jnp.float32)}
    found = Scores(*map(np.asarray, scored(params, jnp.float32(h), labels, SMALL, 300, chunk)))
    args = jnp.arange(7), jnp.asarray(labels), jnp.ones(7)
    want, _ = edge_logprob(jnp.float32(h), jnp.float32(w), *args)
    np.testing.assert_allclose(found.logprobs, want, atol=1e-5)
    assert found.top_ids.shape == found.top_logprobs.shape == (7, SMALL.vocab)
    assert np.array_equal(found.top_ids[np.arange(7), found.ranks - 1], labels)
    np.testing.assert_allclose(
        np.take_along_axis(found.top_logprobs, found.ranks[:, None] - 1, 1)[:, 0], want, atol=1e-5
    )
    place = {token: np.argmax(found.top_ids == token, axis=1) for token in (4, 9)}
    assert np.array_equal(place[9], place[4] + 1)


def test_cold_cached_and_among_others_they_are_the_trainers() -> None:
    """In spans of 8 tokens, and with `top` from none to all that the engine tells."""

    async def run() -> None:
        async with served(TOLD) as engine:
            for tokens in PROMPTS:
                chunk = await told(engine, tokens)
                check(chunk.prompt, weights(), tokens)
            plain = [await first_of(engine, ask(p, seed=1, max_tokens=3)) for p in PROMPTS]
            assert [c.cached_tokens for c in plain] == [0, 0, 0, 8, 16, 24], "pages are found"
            assert all(chunk.prompt is None for chunk in plain)
            requests = [told(engine, p, top) for p, top in zip(PROMPTS, range(6), strict=True)]
            again = await asyncio.gather(*requests)
            for tokens, top, chunk, other in zip(PROMPTS, range(6), again, plain, strict=True):
                check(chunk.prompt, weights(), tokens, top)
                assert chunk.cached_tokens == 0
                assert chunk.ids.tolist() == other.ids.tolist()

    asyncio.run(run())


def test_what_is_put_back_is_told_once_and_of_one_version() -> None:
    """With hardly any pages, while weights change under requests that have just begun."""
    versions = {v: weights(v) for v in range(4)}

    async def run() -> tuple[list[Chunk], dict[str, float]]:
        async with served(TOLD) as engine, asyncio.TaskGroup() as group:
            tasks = [group.create_task(told(engine, p, most=31)) for p in PROMPTS * 3]
            for version in (1, 2, 3):
                while engine.stats()["tokens_sampled"] < 30 * version:
                    await asyncio.sleep(0)
                await engine.swap(version, versions[version])
        return [task.result() for task in tasks], dict(engine.stats())

    found, stats = asyncio.run(run())
    assert stats["preemptions"] > 0
    assert len({int(chunk.versions[0]) for chunk in found}) > 1
    for chunk, tokens in zip(found, PROMPTS * 3, strict=True):
        check(chunk.prompt, versions[int(chunk.versions[0])], tokens)


def test_a_request_that_is_scored_changes_no_bit_of_others_in_deterministic_mode() -> None:
    rollout = dataclasses.replace(TOLD, deterministic=True)

    async def run() -> None:
        async with served(rollout) as engine:
            cold = await complete(engine, ask(PROMPTS[-2], seed=1))
        async with served(rollout) as engine:
            check((await told(engine, PROMPTS[-2])).prompt, weights(), PROMPTS[-2])
            after = await complete(engine, ask(PROMPTS[-2], seed=1))
            cached = await complete(engine, ask(PROMPTS[-2], seed=1))
        assert cold.ids == after.ids == cached.ids
        assert cold.logprobs.tobytes() == after.logprobs.tobytes() == cached.logprobs.tobytes()

    asyncio.run(run())


@pytest.mark.parametrize("several", ["router", "apart"])
def test_an_engine_made_of_others_tells_them_too(several: str) -> None:
    async def run() -> None:
        async with idle_engine(TOLD) as one, idle_engine(TOLD) as two:
            parts = {"one": one, "two": two}
            both = (
                Router(parts, TOLD, RouterConfig())
                if several == "router"
                else DisaggregatedEngine([one], [two], TOLD)
            )
            async with serving(both):
                await asyncio.gather(*(first_of(both, ask(p, seed=1)) for p in PROMPTS))
                chunks = await asyncio.gather(*(told(both, p) for p in PROMPTS))
        for tokens, chunk in zip(PROMPTS, chunks, strict=True):
            check(chunk.prompt, weights(), tokens)
            assert chunk.cached_tokens == 0

    asyncio.run(run())


def test_on_a_mesh_they_are_those_of_one_device() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)  # of two places, which read a prompt each at once
    cut = jax.device_put(weights(), shardings(layout(SMALL), mesh))

    async def run() -> None:
        async with served(TOLD, params=cut) as engine:
            found = await asyncio.gather(*(told(engine, tokens) for tokens in PROMPTS[-3:]))
        for tokens, chunk in zip(PROMPTS[-3:], found, strict=True):
            check(chunk.prompt, weights(), tokens)

    asyncio.run(run())


def test_they_are_those_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    transformers = pytest.importorskip("transformers")
    export_folder(tmp_path / "model", SMALL, weights(), BYTES, built_in("chatml"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = PROMPTS[-1]

    async def run() -> Chunk:
        async with served(TOLD) as engine:
            return await told(engine, tokens)

    found = asyncio.run(run()).prompt
    assert found is not None
    with torch.inference_mode():
        logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float()
    logprobs = logits.log_softmax(-1)[:-1]
    want = logprobs[torch.arange(30), torch.tensor(tokens[1:].astype(np.int64))]
    np.testing.assert_allclose(found.logprobs, want.numpy(), atol=1e-5)
    top = logprobs.topk(5)
    np.testing.assert_array_equal(found.top_ids, top.indices.numpy())
    np.testing.assert_allclose(found.top_logprobs, top.values.numpy(), atol=1e-5)


@pytest.mark.parametrize(("most", "asked"), [(None, 0), (2, 3)])
def test_what_the_engine_was_not_made_for_is_refused(most: int | None, asked: int) -> None:
    async def run() -> None:
        async with served(dataclasses.replace(TOLD, prompt_logprobs=most)) as engine:
            with pytest.raises(Refused, match=f"prompt_logprobs={asked} .*rollout.prompt") as no:
                await told(engine, PROMPTS[0], asked)
            assert no.value.status == 400

    asyncio.run(run())
