"""Episodes of a run: the same tokens again, in sessions that no other episode can name."""

import asyncio

from openai import AsyncOpenAI

from forge_jax.agents.families import agent_of
from forge_jax.config import BudgetConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.play import Player
from forge_jax.rollout.script import Rule
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Request, Status, Task

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))


class Recording(ScriptedEngine):
    """Remembers what it was asked."""

    def __init__(self, text: str = "!x") -> None:
        super().__init__((Rule(text=text),), CHAT.tokenizer, CHAT.stop_ids[0])
        self.requests: list[Request] = []

    async def generate(self, request: Request):
        self.requests.append(request)
        async for chunk in super().generate(request):
            yield chunk


def test_an_episode_played_again_draws_the_same_in_a_session_of_another_name() -> None:
    names: list[str] = []
    ids: list[str] = []

    class Watched(Gateway):
        def open(self, session: str, *rest, **options) -> None:
            names.append(session)
            ids.append(options["ids"])
            super().open(session, *rest, **options)

    async def test() -> None:
        engine = Recording()
        gateway = Watched(engine, CHAT, "m", "admin")
        async with gateway.running() as url, AsyncOpenAI(base_url=url, api_key="none") as client:
            player = Player(
                agent=agent_of("hop", None), gateway=gateway, url=url, client=client,
                model="m", purpose="train",
                seed=3, temperature=1.0, seconds=20.0,
            )  # fmt: skip
            task = Task(family="hop", seed=1)
            one, again = [await player.episode(5, 0, task) for _ in range(2)]
        assert one.outcome.valid
        assert [t.prompt.tolist() for t in one.turns] == [t.prompt.tolist() for t in again.turns]
        half = len(engine.requests) // 2
        seeds = [request.sampling.seed for request in engine.requests]
        assert seeds[:half] == seeds[half:]
        assert None not in seeds

    asyncio.run(test())
    assert len(set(names)) == 2
    assert set(ids) == {"train-5-0"}  # of which ids of calls are made, that a model may read
    assert all(len(name.removeprefix("train-5-0-")) >= 20 for name in names)


def test_an_outcome_says_that_its_episode_ran_into_its_budget() -> None:
    async def test() -> None:
        engine = Recording("?s")  # an agent that would look things up for ever
        gateway = Gateway(engine, CHAT, "m", "admin")
        async with gateway.running() as url, AsyncOpenAI(base_url=url, api_key="none") as client:
            found = {}
            for requests in (2, 1000):
                player = Player(
                    agent=agent_of("hop", None), gateway=gateway, url=url, client=client,
                    model="m", purpose="train", seed=3, temperature=1.0, seconds=20.0,
                    budget=BudgetConfig(requests=requests),
                )  # fmt: skip
                found[requests] = await player.episode(5, 0, Task(family="hop", seed=1))
        assert found[2].outcome.status is Status.AGENT_FAILED
        assert "HTTP 429" in found[2].outcome.error
        assert len(found[2].turns) == 2
        assert found[2].outcome.metrics["over_budget"] == 1
        assert found[1000].outcome.metrics["over_budget"] == 0

    asyncio.run(test())
