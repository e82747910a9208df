"""What the engine's router chose is what the trainer computes with, from call to gradient.

Conversations of several calls go through the real gateway and engine; their turns are trained.
"""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import resolve
from forge_jax.attention.reference import reference_attention
from forge_jax.config import PackConfig, RolloutConfig, UserError
from forge_jax.models.layout import layout
from forge_jax.models.load import LoadedModel
from forge_jax.models.transformer import hidden
from forge_jax.rl.credit import group_samples
from forge_jax.rl.forward import StepConfig, occurrences, to_batch
from forge_jax.rl.serving import Serving, serving
from forge_jax.rollout.fitting import check_model
from forge_jax.sched.merge import unique_tokens
from forge_jax.sched.pack import micro_batches
from forge_jax.sharding import make_mesh, shardings
from forge_jax.types import NO_ROUTE, Episode, Outcome, PackedTree, Sample, Status, Task, Turn

ROLLOUT = RolloutConfig(slots=4, context=64, decode_steps=3, routes=True)
CALLS, EPISODES = 3, 3


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """Its norm scales and router biases are not what they begin as: each of them matters."""
    found, rng = resolve("quick-moe", seed=3), np.random.default_rng(0)

    def moved(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype) if x.ndim < 3 else x

    layers = jax.tree.map(moved, found.params["layers"])
    return dataclasses.replace(found, params={**found.params, "layers": layers})


async def talk(up: Serving, number: int) -> tuple[Turn, ...]:
    """A conversation whose replies stay in its history."""
    session = f"talk-{number}"
    up.gateway.open(session, seed=number, temperature=1.0)
    client = up.client.with_options(base_url=f"{up.url}/s/{session}/v1")
    messages: list[Any] = []
    for call in range(CALLS):
        messages.append({"role": "user", "content": "ab cd"[call:]})
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=7)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return up.gateway.close(session)


@pytest.fixture(scope="module")
def talks(model: LoadedModel) -> list[tuple[Turn, ...]]:
    """Conversations held at once, and behind them the first one again, by itself."""

    async def play() -> list[tuple[Turn, ...]]:
        with ThreadPoolExecutor(1) as device:
            async with serving(model, model.params, 0, ROLLOUT, device) as up:
                together = await asyncio.gather(*(talk(up, n) for n in range(EPISODES)))
                return [*together, await talk(up, 0)]

    return asyncio.run(play())


@pytest.fixture(scope="module")
def episodes(talks: list[tuple[Turn, ...]]) -> list[Episode]:
    task = Task(family="hop", seed=0)
    return [
        Episode(
            item=0,
            replica=replica,
            task=task,
            outcome=Outcome(status=Status.COMPLETED, reward=float(replica)),
            turns=turns,
        )
        for replica, turns in enumerate(talks[:EPISODES])
    ]


@partial(jax.jit, static_argnames="cfg")
def chosen(params: Any, tokens: Any, cfg: Any) -> Any:
    """[T, layers, k], the experts that the router chooses for a padded sequence."""
    order = jnp.arange(len(tokens))

    def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
        ends = jnp.full(len(tokens), len(tokens))
        return reference_attention(q, k, v, order, order, ends, q.shape[-1] ** -0.5)[0], cache

    return jnp.moveaxis(hidden(params, tokens, order, attend, cfg)[2].experts, 0, 1)


def test_the_engine_records_what_its_router_chose(model, episodes) -> None:
    """At every token that was fed, of prompts that repeat what was sampled before too."""
    for episode in episodes:
        assert len(episode.turns) == CALLS
        for call, turn in enumerate(episode.turns):
            assert turn.parent == (call - 1 if call else None), "a history that went on elsewhere"
            tokens = np.concatenate([turn.prompt, turn.output])
            assert turn.routes.shape == (len(tokens), 2, 2)
            assert turn.routes.dtype == np.int8
            assert np.all(turn.routes[-1] == NO_ROUTE), "the last token was never fed"
            padded = np.zeros(ROLLOUT.context, np.int32)
            padded[: len(tokens)] = tokens
            want = np.asarray(chosen(model.params, padded, model.cfg))[: len(tokens) - 1]
            np.testing.assert_array_equal(np.sort(turn.routes[:-1]), np.sort(want))


def test_a_request_gets_the_same_whatever_runs_beside_it(talks) -> None:
    """And whatever is cached, which all of the second time is."""
    for turn, alone in zip(talks[0], talks[-1], strict=True):
        for name in ("prompt", "output"):
            np.testing.assert_array_equal(getattr(turn, name), getattr(alone, name))
        np.testing.assert_allclose(turn.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_array_equal(np.sort(turn.routes), np.sort(alone.routes))


@pytest.mark.slow
def test_an_engine_on_a_mesh_routes_as_on_one_device(model, talks) -> None:
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    cut = jax.device_put(model.params, shardings(layout(model.cfg), mesh))

    async def play() -> tuple[Turn, ...]:
        with ThreadPoolExecutor(1) as device:
            async with serving(model, cut, 0, ROLLOUT, device) as up:
                return await talk(up, 0)

    for turn, found in zip(talks[0], asyncio.run(play()), strict=True):
        np.testing.assert_array_equal(found.output, turn.output)
        np.testing.assert_allclose(found.logprobs, turn.logprobs, atol=1e-5)
        np.testing.assert_array_equal(np.sort(found.routes), np.sort(turn.routes))


def test_calls_of_one_conversation_stay_one_path(model, episodes) -> None:
    """The token between two calls, which the first one never fed, has the second one's route."""
    for episode in episodes:
        again = dataclasses.replace(
            episode, replica=9, outcome=Outcome(status=Status.COMPLETED, reward=0.5)
        )
        samples = [s for s, _ in group_samples([episode, again])][:CALLS]
        longest = samples[-1]
        assert unique_tokens(samples) == len(longest.tokens)
        for before, sample in pairwise(samples):
            np.testing.assert_array_equal(before.routes, sample.routes[: len(before.tokens)])
        assert np.all(longest.routes[:-1] >= 0)
        for turn, sample in zip(episode.turns, samples, strict=True):
            np.testing.assert_array_equal(turn.routes[:-1], sample.routes[:-1])
            assert np.all(turn.routes[-1] == NO_ROUTE), "the record itself was changed"


def without(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(sample, routes=None) for sample in samples]


def test_replayed_routes_bring_the_trainer_nearer_to_the_engine(model, episodes) -> None:
    """A trainer in 16 bits, whose own router decides otherwise here and there."""
    cfg = StepConfig(model=model.cfg, tile=16, dtype="bfloat16")
    samples = [sample for sample, _ in group_samples(episodes)]
    gaps, experts = [], []
    for of in (samples, without(samples)):
        [tree] = micro_batches(of, "tree", PackConfig(tile=16))
        assert isinstance(tree, PackedTree)
        found = jax.jit(occurrences, static_argnums=2)(model.params, to_batch(tree, cfg), cfg)
        gaps.append(np.abs(found.logp - tree.old_logp)[tree.weight > 0])
        experts.append(np.moveaxis(np.asarray(found.routing.experts), 0, 1))
        if tree.routes is not None:
            given = tree.routes >= 0
            assert given[: tree.n_tokens].mean() > 0.8
            np.testing.assert_array_equal(experts[0][given], tree.routes[given])
    replayed, own = gaps
    assert replayed.mean() < 0.8 * own.mean()
    assert replayed.max() < own.max()


def test_a_model_without_experts_has_no_routes() -> None:
    with pytest.raises(UserError, match=r"rollout\.routes=True: the model has no experts"):
        check_model(ROLLOUT, resolve("quick").cfg)
