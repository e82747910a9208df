"""A planner and its workers: one session, contexts of their own, credit by agent."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from openai import AsyncOpenAI

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.scripting import saying
from forge_jax.agents.tasks import wiki, wiki_team
from forge_jax.agents.team import DELEGATE, PLANNER, WORKER, handed
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.credit import credited
from forge_jax.rl.demonstrate import Prompter
from forge_jax.rl.play import Player
from forge_jax.types import Branch, Episode, Task

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
TASK = Task(family="wiki_team", seed=3)
WORLD = wiki.world_of(TASK)


def scripted(shy: float = 0.0) -> tuple[ScriptedCall, ...]:
    return wiki_team.script(WORLD, np.random.default_rng(0), wiki.Noise(shy=shy))


def played(*said: Sequence[ScriptedCall]) -> tuple[Episode, ...]:
    """A group of episodes, in each of which the model says what these calls do."""

    async def run() -> tuple[Episode, ...]:
        prompter = Prompter(CHAT)
        gateway = Gateway(prompter, CHAT, "m", "admin")
        async with gateway.running() as url, AsyncOpenAI(base_url=url, api_key="none") as client:
            player = Player(
                agent=wiki_team.agent(), gateway=gateway, url=url, client=client, model="m",
                purpose="train", seed=0, temperature=1.0, seconds=20.0,
            )  # fmt: skip
            for replica, calls in enumerate(said):
                prompter.learn(player.name(0, replica), calls)
            return await player.group(0, TASK, len(said))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def group() -> dict[str, Episode]:
    """Episodes of a group, by what goes wrong in them."""
    right = scripted()
    errand = next(i for i, c in enumerate(right) if i and c.tools == (DELEGATE,)) - 1
    wrong = replace(right[errand], reply=saying("nobody"))
    lost = (*right[:errand], wrong, *right[errand + 1 :])
    found = played(right, scripted(shy=1.0), lost)
    return dict(zip(("", "planner", "worker"), found, strict=True))


def test_every_agent_has_a_context_of_its_own_in_one_session(group: dict[str, Episode]) -> None:
    calls, episode = scripted(), group[""]
    assert episode.outcome.reward == 1.0
    rendered = [CHAT.format.render(c.messages, c.tools) for c in calls]
    assert [CHAT.tokenizer.decode(t.prompt) for t in episode.turns] == rendered
    agents = [PLANNER if c.tools == (DELEGATE,) else WORKER for c in calls]
    assert [turn.agent for turn in episode.turns] == agents
    branches = [turn.lineage.branch for turn in episode.turns if turn.lineage is not None]
    begun = [b for b, c in zip(branches, calls, strict=True) if len(c.messages) == 1]
    assert begun[0] is Branch.ROOT
    assert Branch.CONTINUE not in begun
    assert branches.count(Branch.CONTINUE) == len(calls) - len(begun)
    assert episode.outcome.metrics["errands"] == len(begun) - 1
    assert episode.outcome.metrics["turns"] == len(calls)


def test_each_is_credited_from_its_own_reward(group: dict[str, Episode]) -> None:
    right, planner, worker = group.values()
    errands = right.outcome.metrics["errands"]
    assert [e.outcome.reward for e in group.values()] == [1.0, 0.0, 1.0]
    assert [e.outcome.agents[WORKER] for e in group.values()] == [1.0, 1.0, 1 - 1 / errands]
    (found,) = credited([list(group.values())])
    for episode, values in zip(group.values(), found, strict=True):
        for turn, value in zip(episode.turns, values, strict=True):
            good = episode is not (planner if turn.agent == PLANNER else worker)
            assert (value > 0) == good, (turn.agent, value)


def test_a_worker_is_judged_by_what_it_was_asked() -> None:
    known = next(iter(WORLD.pages))
    word = wiki.answered(f"{known}'s {relation_of(known)}?", WORLD.pages)
    task = f"{known}'s {relation_of(known)}?"
    assert wiki_team.judged(WORLD, task, word) == 1
    assert wiki_team.judged(WORLD, task, "") == 0
    for senseless in ("What?", "Zed's Town?", f"{known}'s Shoe?"):
        assert wiki_team.judged(WORLD, senseless, "") == 0


def relation_of(name: str) -> str:
    return WORLD.pages[name].split(". ")[1].split()[0]


def test_what_is_no_task_is_a_bad_call() -> None:
    assert handed(json.loads('{"task": "Bob"}')) == "Bob"
    for wrong in ({}, {"task": 3}, {"task": " "}, {"text": "Bob"}):
        with pytest.raises(BadCall, match="delegate"):
            handed(wrong)
