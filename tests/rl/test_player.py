"""Episodes of a run: the same tokens again, in sessions that no other episode can name."""

import asyncio

import pytest
from openai import AsyncOpenAI

from forge_jax import restarts
from forge_jax.agents import white_box
from forge_jax.agents.families import agent_of
from forge_jax.config import BudgetConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.server import NAME
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.play import Player
from forge_jax.rl.serving import shared_client
from forge_jax.rollout.script import Rule
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Episode, Finish, Request, Status, Task

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


class Cut(Recording):
    """Answers the `lost`-th request only once its connection and the server have been lost."""

    def __init__(self, text: str, lost: int):
        super().__init__(text)
        self.lost = lost

    async def generate(self, request: Request):
        number = len(self.requests)
        async for chunk in super().generate(request):
            if number == self.lost:
                self.lose()
                await asyncio.sleep(3600)  # until its caller is found to be gone
            yield chunk

    def lose(self) -> None:
        [running] = [task for task in asyncio.all_tasks() if task.get_name() == NAME]
        frame = running.get_coro().cr_frame  # of `uvicorn.Server.serve`
        for connection in list(frame.f_locals["self"].server_state.connections):
            connection.transport.abort()
        running.cancel()


def test_a_gateway_that_is_lost_within_an_episode_costs_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (restarts, white_box):
        monkeypatch.setattr(module, "FIRST_WAIT", 0.02)

    async def play(engine: Recording) -> tuple[Episode, int]:
        gateway = Gateway(engine, CHAT, "m", "admin")
        async with gateway.running() as url, shared_client(url) as client:
            player = Player(
                agent=agent_of("hop", None), gateway=gateway, url=url, client=client,
                model="m", purpose="train", seed=3, temperature=1.0, seconds=20.0,
            )  # fmt: skip
            found = await player.episode(5, 0, Task(family="hop", seed=1))
        return found, gateway.restarts

    async def test() -> None:
        engine = Cut("?s", lost=1)
        (calm, none), (found, one) = await play(Recording("?s")), await play(engine)
        assert (none, one) == (0, 1)
        assert found.outcome.status is calm.outcome.status is Status.COMPLETED
        whole = [turn for turn in found.turns if turn.finish is not Finish.ABORT]
        assert len(whole) == len(calm.turns) == found.outcome.metrics["turns"]
        for turn, other in zip(whole, calm.turns, strict=True):
            assert turn.prompt.tolist() == other.prompt.tolist()
            assert turn.output.tolist() == other.output.tolist()
        seeds = [request.sampling.seed for request in engine.requests]
        assert seeds[1] == seeds[2], "the call that was lost is drawn as before"
        assert len(set(seeds)) == len(seeds) - 1

    asyncio.run(test())
