"""Demonstrations: an agent plays before a model that follows a script, and all calls are kept.

A task family's script and an agent, white box or a program, flow in; its episodes flow out as
samples to imitate. Their contexts are what the agent itself sent to a gateway, so the policy meets
nothing new when it takes the place of the script.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from forge_jax.agents.families import agent_of, script_of
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.config import TrainConfig, UserError
from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat
from forge_jax.models.load import LoadedModel
from forge_jax.rl.play import Player
from forge_jax.rl.serving import shared_client
from forge_jax.rl.warm import imitated, written
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Chunk, Episode, Request, Sample, Task

PURPOSE = "demonstration"
Demonstration = tuple[Sample, ...]  # the calls of one episode


class Prompter:
    """An engine that follows another script in every session."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._scripts: dict[str, ScriptedEngine] = {}

    def learn(self, session: str, calls: Sequence[ScriptedCall]) -> None:
        """Call k of `session` will be answered as the k-th of `calls`."""
        replies = [written(self._chat, c.messages, c.tools, c.reply)[1] for c in calls]
        rules = [Rule(when=When(call=k), text=reply) for k, reply in enumerate(replies)]
        self._scripts[session] = ScriptedEngine(rules, self._chat.tokenizer)

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        return self._scripts[request.facts.session].generate(request)


def demonstrations(
    cfg: TrainConfig, model: LoadedModel, advance: Callable[[], None]
) -> list[Demonstration]:
    """`cfg.warm.demonstrations` episodes on training content, the same for the same `cfg`;
    `advance` is called after each.

    Raises UserError where the family has no script, or not every episode came to its end.
    """
    episodes = asyncio.run(played(cfg, model, advance))
    for episode in episodes:
        if not episode.outcome.valid:
            error = f"{episode.outcome.status}: {episode.outcome.error}"
            raise UserError(f"demonstration {episode.item} did not come to its end: {error}")
    return [tuple(imitated(t.prompt, t.output) for t in e.turns) for e in episodes]


async def played(
    cfg: TrainConfig, model: LoadedModel, advance: Callable[[], None]
) -> list[Episode]:
    """The episodes, as the gateway recorded them."""
    assert cfg.task is not None  # domains are refused with demonstrations
    family, prompter = cfg.task, Prompter(model.chat)
    script = script_of(family)
    gateway = Gateway(
        prompter,
        model.chat,
        model.name,
        admin_key=secrets.token_urlsafe(),
        config=GatewayConfig(undeclared=False),
    )
    async with gateway.running() as url, shared_client(url) as client:
        player = Player(
            agent=agent_of(family, cfg.agent, context=cfg.context),
            gateway=gateway,
            url=url,
            client=client,
            model=model.name,
            purpose=PURPOSE,
            seed=cfg.seed,
            temperature=cfg.temperature,
            seconds=cfg.sched.episode_seconds,
        )
        places = asyncio.Semaphore(cfg.eval.concurrency)

        async def one(number: int) -> Episode:
            task = Task(family=family, seed=number, split="train")
            calls = script(task, np.random.default_rng([cfg.seed, number]))
            prompter.learn(player.name(number, 0), calls)
            async with places:
                episode = await player.episode(number, 0, task)
            advance()
            return episode

        async with asyncio.TaskGroup() as group:
            numbers = range(cfg.warm.demonstrations or 0)
            running = [group.create_task(one(number)) for number in numbers]
    return [run.result() for run in running]


def drawn(shown: Sequence[Demonstration], episodes: int, seed: int, step: int) -> list[Sample]:
    """The samples of `episodes` of what was shown; the same for the same arguments."""
    numbers = np.random.default_rng([seed, step]).integers(len(shown), size=episodes)
    return [sample for number in numbers for sample in shown[number]]
