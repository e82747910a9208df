"""A planner and its workers in training: every call once, each by what its own answers are worth.

Gateway, agents, pool, scheduler and trainer are the real ones; what the model says is scripted,
so that it is known who did well.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from openai import AsyncOpenAI
from small_policy import MODEL
from small_run import config

from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.scripting import saying
from forge_jax.agents.tasks import wiki, wiki_team
from forge_jax.agents.team import DELEGATE, PLANNER, WORKER
from forge_jax.config import CreditConfig, RewardConfig, TrainConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models import layout
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.rl.demonstrate import Prompter
from forge_jax.rl.loop import Prepared, prepare
from forge_jax.rl.losses import LOSSES
from forge_jax.rl.mixture import lanes_of, sources_of
from forge_jax.rl.play import Player
from forge_jax.rl.rewards import Scorer
from forge_jax.rl.state import create
from forge_jax.rl.step import StepConfig, scatter, update
from forge_jax.sched.cost import CostModel
from forge_jax.sched.pool import Pool
from forge_jax.types import Task

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
CFG: TrainConfig = replace(
    config(synchronous=True, batch=2, group=3, in_flight=None, window=0), task="wiki_team"
)
SMALL = replace(MODEL, vocab=264, layers=1)


def scripts(task: Task) -> list[tuple[ScriptedCall, ...]]:
    """Of a group: all is right, the planner gives up, a worker finds nobody."""
    world, rng = wiki.world_of(task), np.random.default_rng(0)
    right = wiki_team.script(world, rng, wiki.Noise(shy=0.0))
    ends = [i - 1 for i, c in enumerate(right) if i and c.tools == (DELEGATE,)]
    lost = [replace(c, reply=saying("nobody")) if i == ends[0] else c for i, c in enumerate(right)]
    return [right, wiki_team.script(world, rng, wiki.Noise(shy=1.0)), tuple(lost)]


async def collected(folder: Path) -> list[Taken]:
    """A batch of groups that were played through the gateway and read back from the pool."""
    prompter = Prompter(CHAT)
    gateway = Gateway(prompter, CHAT, "m", "admin")
    async with gateway.running() as url, AsyncOpenAI(base_url=url, api_key="none") as client:
        player = Player(
            agent=wiki_team.agent(), gateway=gateway, url=url, client=client, model="m",
            purpose="train", seed=0, temperature=1.0, seconds=20.0,
        )  # fmt: skip

        async def play(number: int, task: Task) -> Group:
            for replica, calls in enumerate(scripts(task)):
                prompter.learn(player.name(number, replica), calls)
            return await player.group(number, task, CFG.sched.group)

        collector = Collector(
            lanes=lanes_of(CFG), pool=Pool.open(str(folder)), sources=sources_of(CFG), play=play,
            patience=60.0,
        )  # fmt: skip
        async with asyncio.TaskGroup() as workers:
            collector.fill(workers)
            taken = await collector.take(workers)
            collector.cancel()
        return taken


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> list[Taken]:
    return asyncio.run(collected(tmp_path_factory.mktemp("pool")))


@pytest.fixture(scope="module")
def batch(taken: list[Taken]) -> Prepared:
    scorer = Scorer(reward=RewardConfig(), credit=CreditConfig(), decode=CHAT.tokenizer.decode)
    return prepare(taken, CFG, CostModel(), scorer)


def test_every_call_of_every_agent_is_trained_once(taken: list[Taken], batch: Prepared) -> None:
    played = [turn for item in taken for e in item.episodes for turn in e.turns]
    assert len(taken) == CFG.sched.batch
    assert {turn.agent for turn in played} == {PLANNER, WORKER}
    assert Counter(map(id, batch.turns)) == Counter(map(id, played))
    assert not any(batch.left_out.values())
    for sample, turn in zip(batch.samples, batch.turns, strict=True):
        assert np.array_equal(sample.tokens, [*turn.prompt, *turn.output])
        assert np.array_equal(
            np.flatnonzero(sample.mask), len(turn.prompt) + np.arange(len(turn.output))
        )


def test_advantages_are_those_of_the_agent_s_own_reward(
    taken: list[Taken], batch: Prepared
) -> None:
    found = {id(t): s.advantage[s.mask] for s, t in zip(batch.samples, batch.turns, strict=True)}
    for item in taken:
        own = {
            PLANNER: [e.outcome.reward for e in item.episodes],
            WORKER: [e.outcome.agents[WORKER] for e in item.episodes],
        }
        assert own == {PLANNER: [1.0, 0.0, 1.0], WORKER: [1.0, 1.0, 0.5]}
        for number, episode in enumerate(item.episodes):
            for turn in episode.turns:
                rewards = own[turn.agent or ""]
                others = [value for i, value in enumerate(rewards) if i != number]
                assert np.allclose(found[id(turn)], rewards[number] - np.mean(others))


def test_updates_move_each_agent_towards_what_its_own_reward_liked(batch: Prepared) -> None:
    step = StepConfig(
        model=SMALL, optim=replace(CFG.optim, learning_rate=1e-3), loss=LOSSES["reinforce"],
        objective=CFG.loss, ratio_cap=CFG.ratio_cap, tile=CFG.pack.side, attention="reference",
    )  # fmt: skip
    state = create(layout.init(SMALL, jax.random.key(0), np.dtype("float32")), step.optim)
    lengths = [len(sample.tokens) for sample in batch.samples]
    told = []
    for _ in range(3):
        state, done = update(state, batch.trees, step)
        assert done.stepped
        told.append(np.split(scatter(done.logp, done.index, sum(lengths)), np.cumsum(lengths)[:-1]))
    gained = {PLANNER: 0.0, WORKER: 0.0}
    for sample, turn, before, after in zip(
        batch.samples, batch.turns, told[0], told[-1], strict=True
    ):
        gained[turn.agent or ""] += float(np.sum(sample.advantage * (after - before)))
    assert min(gained.values()) > 0, gained
