"""A planner and its workers in a run: every call once, each by what its own answers are worth.

Engine, gateway, agents, pool, scheduler and trainer are the real ones. The policy has learned by
heart three courses of every task that it will meet, so that by chance it takes each of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from small_policy import MODEL
from small_run import config

from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.scripting import saying
from forge_jax.agents.tasks import wiki, wiki_team
from forge_jax.agents.team import DELEGATE, PLANNER, WORKER
from forge_jax.config import (
    EvalConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
    WarmConfig,
)
from forge_jax.models import layout
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.load import LoadedModel
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl import loop, run
from forge_jax.rl.collect import Taken
from forge_jax.rl.evaluate import held_out
from forge_jax.rl.loop import Prepared
from forge_jax.rl.mixture import sources_of
from forge_jax.rl.start import step_config
from forge_jax.rl.state import create
from forge_jax.rl.step import Updated, scatter, update
from forge_jax.rl.warm import reply_sample
from forge_jax.sched.pack import micro_batches
from forge_jax.types import Episode, Task, Turn

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
SMALL = replace(MODEL, vocab=264, layers=1, embed=32)
BY_HEART = 60  # steps of it
PASSES = 2  # over what is consumed: the second one tells what the first one did
CFG: TrainConfig = replace(
    config(
        synchronous=True,
        batch=1,
        group=6,
        in_flight=1,
        window=0,
        episode_seconds=60.0,
        epochs=PASSES,
    ),
    task="wiki_team",
    steps=2,
    warm=WarmConfig(steps=0, gate=0.0, optim=OptimConfig(learning_rate=1e-2, decay_steps=0)),
    optim=OptimConfig(learning_rate=1e-4, warmup_steps=0, decay_steps=0),
    loss=LossConfig(kind="reinforce"),
    rollout=RolloutConfig(slots=16, context=128, decode_steps=4, deterministic=True),
    eval=EvalConfig(episodes=1, concurrency=1),
)


@dataclass(frozen=True, kw_only=True)
class Consumed:
    """A batch of a run: what it read of the pool, what it made of it, its update in each pass."""

    taken: list[Taken]
    batch: Prepared
    updates: list[Updated]

    @property
    def groups(self) -> list[tuple[Episode, ...]]:
        return [item.episodes for item in self.taken]


def courses(task: Task) -> list[tuple[ScriptedCall, ...]]:
    """All is right, the planner gives up, a worker finds nobody."""
    world, rng = wiki.world_of(task), np.random.default_rng(0)
    right = wiki_team.script(world, rng, wiki.Noise(shy=0.0))
    ends = [i - 1 for i, c in enumerate(right) if i and c.tools == (DELEGATE,)]
    lost = [replace(c, reply=saying("nobody")) if i == ends[0] else c for i, c in enumerate(right)]
    return [right, wiki_team.script(world, rng, wiki.Noise(shy=1.0)), tuple(lost)]


def knowing(tasks: Sequence[Task]) -> LoadedModel:
    """A policy that knows the courses of some tasks by heart."""
    samples = [
        reply_sample(CHAT, call.messages, call.tools, call.reply)
        for task in tasks
        for course in courses(task)
        for call in course
    ]
    params = layout.init(SMALL, jax.random.key(0), np.dtype("float32"))
    model = LoadedModel(cfg=SMALL, params=params, chat=CHAT, name="small")
    step = replace(step_config(CFG, model, warm=False), optim=CFG.warm.optim)
    state, parts = create(params, step.optim), micro_batches(samples, "tree", CFG.pack)
    for _ in range(BY_HEART):
        state, _ = update(state, parts, step)
    return replace(model, params=state.params)


@pytest.fixture(scope="module")
def consumed(tmp_path_factory: pytest.TempPathFactory) -> list[Consumed]:
    """The batches of a run."""
    [source] = sources_of(CFG)
    tasks = [next(source) for _ in range(CFG.steps * CFG.sched.batch)]
    policy = knowing(tasks + held_out(CFG.task, CFG.eval.episodes, CFG.eval.seed))
    prepare, update, found = loop.prepare, loop.update, list[Consumed]()

    def prepared(taken: list[Taken], *args: Any) -> Prepared:
        found.append(Consumed(taken=taken, batch=prepare(taken, *args), updates=[]))
        return found[-1].batch

    def updated(*args: Any) -> Any:
        state, done = update(*args)
        found[-1].updates.append(done)
        return state, done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", prepared)
        patch.setattr(loop, "update", updated)
        run.train(CFG, policy, tmp_path_factory.mktemp("run"), {})
    return found


def reward_of(turn: Turn, episode: Episode) -> float:
    """What its own agent's part of an episode was worth."""
    return episode.outcome.agents.get(turn.agent or "", episode.outcome.reward)


def test_every_call_that_can_teach_is_a_sample_once_with_its_agent_s_advantage(
    consumed: list[Consumed],
) -> None:
    taught = set[str | None]()
    for one in consumed:
        of = {id(t): s for s, t in zip(one.batch.samples, one.batch.turns, strict=True)}
        expected = Counter[int]()
        for group in one.groups:
            for number, episode in enumerate(group):
                for turn in episode.turns:
                    own, *others = (
                        reward_of(turn, e) for e in (episode, *group[:number], *group[number + 1 :])
                    )
                    if {own} == set(others):
                        continue
                    sample, start = of[id(turn)], len(turn.prompt)
                    expected[id(turn)] += 1
                    taught.add(turn.agent)
                    assert np.array_equal(sample.tokens, [*turn.prompt, *turn.output])
                    assert np.array_equal(
                        np.flatnonzero(sample.mask), range(start, len(sample.mask))
                    )
                    assert np.allclose(sample.advantage[sample.mask], own - np.mean(others))
        assert Counter(map(id, one.batch.turns)) == expected
    assert taught == {PLANNER, WORKER}
    episodes = [e for one in consumed for group in one.groups for e in group]
    assert any(e.outcome.agents.get(WORKER, e.outcome.reward) != e.outcome.reward for e in episodes)


def test_agents_play_with_the_weights_of_the_update_before(consumed: list[Consumed]) -> None:
    assert len(consumed) == CFG.steps
    for updates, one in enumerate(consumed):
        assert len(one.taken) == CFG.sched.batch
        assert {t.agent for g in one.groups for e in g for t in e.turns} == {PLANNER, WORKER}
        versions = {v for g in one.groups for e in g for t in e.turns for v in t.versions.tolist()}
        assert versions == {updates}


def test_updates_move_each_agent_towards_what_its_own_reward_liked(
    consumed: list[Consumed],
) -> None:
    gained = Counter[str | None]()
    for one in consumed:
        lengths = [len(sample.tokens) for sample in one.batch.samples]
        before, after = (
            np.split(scatter(done.logp, done.index, sum(lengths)), np.cumsum(lengths)[:-1])
            for done in one.updates
        )
        for sample, turn, old, new in zip(
            one.batch.samples, one.batch.turns, before, after, strict=True
        ):
            assert np.allclose(old[sample.mask], sample.old_logp[sample.mask], atol=1e-4)
            gained[turn.agent] += float(np.sum(sample.advantage * (new - old)))
    assert min(gained[PLANNER], gained[WORKER]) > 0, gained
