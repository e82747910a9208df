"""Demonstrations are what the agent itself sends: the real client, before a script, recorded."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
from small_run import config
from stand_in_server import completion, replies, stand_in

from experiments.models import resolve
from forge_jax.agents.families import agent_of, script_of
from forge_jax.agents.protocol import Message
from forge_jax.config import ProgramConfig, TrainConfig, UserError
from forge_jax.loading import load
from forge_jax.models.chat import built_in
from forge_jax.rl.demonstrate import demonstrations, drawn
from forge_jax.rl.warm import reply_sample
from forge_jax.types import Sample, Task

pytest.importorskip("agents", reason="the agent is one of openai-agents")
COUNT = 6
QUICK = resolve("quick")
LOOKUP = {"function": "experiments.lookup_agent:answer", "begin": "forked"}


def shown_by(program: ProgramConfig | None, task: str = "hop_tool") -> TrainConfig:
    cfg = config()
    warm = dataclasses.replace(cfg.warm, demonstrations=COUNT)
    sched = dataclasses.replace(cfg.sched, episode_seconds=60.0)
    return dataclasses.replace(cfg, task=task, agent=program, warm=warm, sched=sched)


@pytest.fixture(scope="module")
def shown() -> list[tuple[Sample, ...]]:
    return demonstrations(shown_by(load(ProgramConfig, LOOKUP)), QUICK, lambda: None)


def scripts() -> list:
    script = script_of("hop_tool")
    tasks = [Task(family="hop_tool", seed=i, split="train") for i in range(COUNT)]
    return [script(task, np.random.default_rng([0, i])) for i, task in enumerate(tasks)]


def own_id(reply: Message, identifier: str) -> Message:
    """`reply`, its tool call named as no other; scripts name all of them alike."""
    named = [{**call, "id": identifier} for call in reply.get("tool_calls", ())]
    return {**reply, "tool_calls": named} if named else reply


def test_contexts_are_what_the_client_sends_to_any_server(shown: list[tuple[Sample, ...]]) -> None:
    calls = scripts()[0]
    agent = agent_of("hop_tool", load(ProgramConfig, LOOKUP))

    async def sent() -> list:
        said = [own_id(call.reply, f"call_{i}") for i, call in enumerate(calls)]
        answer, bodies = replies(*map(completion, said))
        async with stand_in(answer) as client:
            await agent.run(Task(family="hop_tool", seed=0, split="train"), client, "m")
        return bodies

    bodies = asyncio.run(sent())
    assert len(bodies) == len(calls) == len(shown[0])
    for body, sample in zip(bodies, shown[0], strict=True):
        written = built_in("lookup").render(body["messages"], body["tools"])
        context = sample.tokens[~sample.mask]
        assert QUICK.chat.tokenizer.decode(context) == written


def test_a_client_that_adds_nothing_is_imitated_as_the_family_plays(
    shown: list[tuple[Sample, ...]],
) -> None:
    chat = QUICK.chat
    for calls, samples in zip(scripts(), shown, strict=True):
        wanted = [reply_sample(chat, c.messages, c.tools, c.reply) for c in calls]
        assert [s.tokens.tolist() for s in samples] == [w.tokens.tolist() for w in wanted]
        assert [s.mask.tolist() for s in samples] == [w.mask.tolist() for w in wanted]
        for earlier, later in itertools.pairwise(samples):
            assert later.tokens[: len(earlier.tokens)].tolist() == earlier.tokens.tolist()


def test_every_agent_can_be_shown(shown: list[tuple[Sample, ...]]) -> None:
    white = demonstrations(shown_by(None), QUICK, lambda: None)
    for one, other in zip(white, shown, strict=True):
        assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in other]


def test_steps_draw_whole_demonstrations_again_alike(shown: list[tuple[Sample, ...]]) -> None:
    once, again, next_step = (drawn(shown, 5, 0, step) for step in (1, 1, 2))
    assert [id(s) for s in once] == [id(s) for s in again] != [id(s) for s in next_step]
    ends = [i for i, s in enumerate(once) if s is shown_last(shown, s)]
    assert len(ends) == 5


def shown_last(shown: list[tuple[Sample, ...]], sample: Sample) -> Sample | None:
    """`sample` if it is the last of its demonstration."""
    return next((one[-1] for one in shown if one[-1] is sample), None)


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UserError, match="task='hop' has no script"):
        demonstrations(shown_by(None, "hop"), QUICK, lambda: None)
    broken = load(ProgramConfig, {**LOOKUP, "function": "experiments.lookup_agent:nowhere"})
    with pytest.raises(UserError, match=r"demonstration 0 .* no attribute 'nowhere'"):
        demonstrations(shown_by(broken), QUICK, lambda: None)
    with pytest.raises(UserError, match="demonstrations=2: steps=0"):
        load(
            TrainConfig,
            {"model": "m", "task": "t", "steps": 1, "warm": {"steps": 0, "demonstrations": 2}},
        )
