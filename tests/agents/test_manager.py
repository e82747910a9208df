"""A managed context: when it is shortened, and that training sees what inference saw."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from forge_jax.agents.context import Context
from forge_jax.agents.families import agent_of, play_of
from forge_jax.agents.faults import BadCall
from forge_jax.agents.manager import Manager, Meter
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import calling, led, saying
from forge_jax.agents.white_box import ToolLoop
from forge_jax.config import ContextConfig, ProgramConfig, UserError
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.credit import group_samples
from forge_jax.rl.demonstrate import Prompter
from forge_jax.rl.play import Player
from forge_jax.rl.warm import written
from forge_jax.types import Branch, Episode, Task

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))
MOVES = 6
CONTINUE = Branch.CONTINUE
LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class Rooms:
    """A world of rooms to look at, one after another."""

    messages: tuple[Message, ...] = (saying("Look around.") | {"role": "user"},)
    tools: tuple[Tool, ...] = (LOOK,)

    def look(self, at: str) -> str:
        return f"room {at} has nothing but dust in it"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "look":
            raise BadCall(f"no tool {name}")
        return self.look(arguments["at"])

    async def score(self, answer: str) -> float:
        return float(answer == "dust")


@dataclass
class Guide:
    """Looks at every room, and now and then does what it may to its context."""

    own: str = ""  # the operation, which it calls in every third reply
    seen: int = 0
    replies: int = 0

    def reply(self, context: Context) -> Message:
        self.replies += 1
        if self.own and self.replies % 3 == 0:
            return calling(self.own, {"text": f"there was dust in {self.seen} of them"})
        self.seen += 1
        return calling("look", {"at": str(self.seen)}) if self.seen <= MOVES else saying("dust")

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        return Rooms().look(arguments["at"])

    def write(self) -> str:
        return f"dust in {self.seen} rooms"


def episodes(cfg: ContextConfig, calls: tuple[ScriptedCall, ...]) -> tuple[Episode, ...]:
    """One in which the model says what the script does, one that it gives up."""
    agent = ToolLoop(start=lambda _: Rooms(), max_turns=12, max_tokens=64, manager=Manager(cfg=cfg))
    given_up = ScriptedCall(messages=Rooms.messages, tools=Rooms.tools, reply=saying("none"))

    async def played() -> tuple[Episode, ...]:
        prompter = Prompter(CHAT)
        gateway = Gateway(prompter, CHAT, "m", "admin")
        async with gateway.running() as url, AsyncOpenAI(base_url=url, api_key="none") as client:
            player = Player(
                agent=agent, gateway=gateway, url=url, client=client, model="m",
                purpose="train", seed=0, temperature=1.0, seconds=20.0,
            )  # fmt: skip
            prompter.learn(player.name(0, 0), calls)
            prompter.learn(player.name(0, 1), [given_up])
            return await player.group(0, Task(family="hop", seed=0), 2)

    return asyncio.run(played())


def script(cfg: ContextConfig, own: str = "") -> tuple[ScriptedCall, ...]:
    return led(Guide(own), Rooms.messages, Rooms.tools, Manager(cfg=cfg), 12)


MANAGED: dict[str, tuple[ContextConfig, Branch, int]] = {
    # how, why the call behind it is a fork, texts that were asked for
    "drop_oldest": (
        ContextConfig(policy="fixed", every=3, operation="drop_oldest", keep=2),
        Branch.TRUNCATED, 0,
    ),
    "drop_tool_results": (
        ContextConfig(policy="fixed", every=3, operation="drop_tool_results", keep=0),
        Branch.TRUNCATED, 0,
    ),
    "truncate": (
        ContextConfig(policy="fixed", every=3, operation="truncate", characters=6),
        Branch.TRUNCATED, 0,
    ),
    "summarise": (
        ContextConfig(policy="fixed", every=3, operation="summarise"), Branch.COMPACTION, 2,
    ),
    "fold": (
        ContextConfig(policy="fixed", every=3, operation="fold"), Branch.HISTORY_EDITED, 2,
    ),
    "note": (
        ContextConfig(policy="fixed", every=3, operation="note", keep=1),
        Branch.HISTORY_EDITED, 2,
    ),
    "chosen": (
        ContextConfig(policy="tool", operation="summarise"), Branch.HISTORY_EDITED, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANAGED)
def test_training_contexts_are_those_of_inference(name: str) -> None:
    """The gateway recorded the contexts that the manager makes, and every reply is a sample."""
    cfg, fork, asked = MANAGED[name]
    calls = script(cfg, "summarise" if cfg.policy == "tool" else "")
    episode, other = episodes(cfg, calls)
    assert (episode.outcome.reward, other.outcome.reward) == (1.0, 0.0)
    rendered = [CHAT.format.render(c.messages, c.tools) for c in calls]
    assert [CHAT.tokenizer.decode(t.prompt) for t in episode.turns] == rendered
    branches = [turn.lineage.branch for turn in episode.turns if turn.lineage is not None]
    forked = [number for number, branch in enumerate(branches) if branch is not CONTINUE]
    assert branches == [
        Branch.ROOT if i == 0 else fork if i in forked else CONTINUE for i in range(len(calls))
    ]
    assert len(forked) == 1 + episode.outcome.metrics["shortened"] >= 3
    assert episode.outcome.metrics["written"] == asked
    samples = group_samples([episode, other])
    trained = [CHAT.tokenizer.decode(sample.tokens[sample.mask]) for sample, _ in samples]
    said = [written(CHAT, c.messages, c.tools, c.reply)[1] for c in calls]
    assert "".join(trained[:-1]) == "".join(said)  # those of calls that continue are one sample
    assert all((sample.advantage[sample.mask] > 0).all() for sample, _ in samples[:-1])


def test_a_threshold_keeps_every_prompt_within_the_budget() -> None:
    budget = 160
    alone, cut = ContextConfig(budget=budget), ContextConfig(budget=1000)
    cfg = ContextConfig(
        policy="threshold", budget=budget, share=0.6, operation="drop_oldest", keep=1
    )
    calls = script(ContextConfig())  # what it says does not depend on what it is told
    kept, broken, whole = (episodes(c, calls)[0] for c in (cfg, alone, cut))
    assert kept.outcome.reward == whole.outcome.reward == 1.0
    assert kept.outcome.metrics["shortened"] >= 1
    assert max(len(turn.prompt) for turn in kept.turns) <= budget
    assert max(len(turn.prompt) for turn in whole.turns) > budget
    assert (broken.outcome.reward, broken.outcome.metrics["overflowed"]) == (0.0, 1.0)
    assert len(broken.turns) < len(whole.turns)
    assert broken.outcome.valid  # it is the policy's fault


def test_a_meter_goes_by_what_the_server_counts() -> None:
    context = Context.begun([saying("x" * 100)])
    meter = Meter().counted(context, 250)
    assert meter.tokens_of(context) == 250
    more = context.append(saying("x" * 40))
    assert meter.tokens_of(more) == 250 + 40 * meter.rate
    meter = meter.counted(more, 270)
    assert (meter.rate, meter.tokens_of(context)) == (0.5, 250)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"policy": "often"}, "policy"),
        ({"policy": "fixed", "every": 2}, "operation"),
        ({"policy": "fixed", "operation": "fold"}, "every"),
        ({"policy": "tool", "operation": "fold", "every": 2}, "every"),
        ({"policy": "threshold", "operation": "fold", "share": 0.5}, "budget"),
        ({"policy": "threshold", "operation": "fold", "budget": 9}, "share"),
        ({"policy": "tool", "operation": "drop_oldest"}, "keep"),
        ({"policy": "tool", "operation": "fold", "keep": 1}, "keep"),
        ({"policy": "tool", "operation": "truncate"}, "characters"),
        ({"policy": "tool", "operation": "fold", "max_tokens": 9}, "max_tokens"),
        ({"operation": "fold"}, "operation"),
    ],
)
def test_a_key_without_effect_or_amiss_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ContextConfig(**keys)


def test_who_manages_a_context_of_its_own_is_not_managed() -> None:
    cfg = ContextConfig(policy="tool", operation="fold")
    agent = agent_of("hop", context=cfg)
    assert isinstance(agent, ToolLoop)
    assert agent.manager.cfg is cfg
    with pytest.raises(UserError, match="notes"):
        agent_of("notes", context=cfg)
    with pytest.raises(UserError, match="program"):
        agent_of("hop", ProgramConfig(command=("true", "{prompt}")), context=cfg)


def test_a_script_is_only_imitated_where_it_calls_what_is_offered() -> None:
    cfg = ContextConfig(policy="tool", operation="fold")
    for name in ("wiki", "maze"):
        (first, *_) = play_of(name, cfg)(np.random.default_rng(0))
        assert "fold" in [tool["function"]["name"] for tool in first.tools]
    with pytest.raises(UserError, match=r"warm\.steps"):
        play_of("hop", cfg)
    play_of("hop", ContextConfig(policy="fixed", every=2, operation="fold"))


def test_an_operation_that_is_called_wrongly_is_a_bad_call() -> None:
    manager = Manager(cfg=ContextConfig(policy="tool", operation="fold"))
    manager.check_call({"text": "x"})
    for wrong in ({}, {"text": 3}, {"text": "x", "more": "y"}, {"result": "x"}):
        with pytest.raises(BadCall, match="fold"):
            manager.check_call(wrong)
