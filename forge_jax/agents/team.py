"""Several agents in one episode: a planner hands tasks over, workers have contexts of their own.

A task flows in, one outcome flows out. Every call says which agent made it, all calls are of one
session, and all are credited from the episode's return; where workers can be judged by
themselves, theirs are credited from that instead. What a worker did is for its planner one
message: its answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openai import AsyncOpenAI

from forge_jax.agents.faults import BadCall, environment
from forge_jax.agents.limits import LIMITS, scored
from forge_jax.agents.manager import Manager
from forge_jax.agents.own_tools import OwnTool
from forge_jax.agents.protocol import Environment, Message, Tool
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Outcome, Task

HEADER = "x-forge-agent"  # in which a call says which agent makes it
PLANNER, WORKER = "planner", "worker"
NO_ANSWER = "no answer"
DELEGATE: Tool = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "Hands a task over to a worker, who has tools, and gives its answer.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string"}},
            "required": ["task"],
        },
    },
}
Judge = Callable[[Environment, str, str], float]  # of a world, a task handed over, its answer


@dataclass(frozen=True)
class Planned:
    """The world as the planner has it: without tools."""

    world: Environment

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.world.messages

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall: tools are the workers'."""
        raise BadCall(f"no tool {name}: delegate what needs tools")

    async def score(self, answer: str) -> float:
        return await LIMITS.get().threads.call(self.world.score, answer)


@dataclass
class Errand:
    """The world as a worker has it: with a task that was handed over; keeps the answer to it."""

    world: Environment
    task: str
    brief: str
    answer: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        return briefed(self.brief, self.task)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.world.tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall as the world does."""
        return await LIMITS.get().threads.call(self.world.call, name, arguments)

    async def score(self, answer: str) -> float:
        self.answer = answer
        return 0.0  # whose reward it is, the team decides


@dataclass(frozen=True, kw_only=True)
class Team:
    """A planner, and a worker for every task that it hands over; several of one reply at once.

    Reward 0 if the planner has not answered after `planner_turns` replies; a worker that has not
    after `worker_turns` gives NO_ANSWER.
    """

    start: Callable[[Task], Environment]
    planner_turns: int
    worker_turns: int
    max_tokens: int
    brief: str = "{task}"  # what a worker is told
    judge: Judge | None = None  # None: workers have the reward of the episode
    manager: Manager = field(default_factory=Manager)  # of every context

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        with environment("reset"):
            world = self.start(task)
        planner = self._loop(self.planner_turns)
        done: list[tuple[Errand, Outcome]] = []

        async def delegate(arguments: Mapping[str, Any]) -> str:
            errand = Errand(world, handed(arguments), self.brief)
            worker = self._loop(self.worker_turns)
            done.append((errand, await worker.work(errand, named(client, WORKER), model)))
            return errand.answer or NO_ANSWER

        own = OwnTool(tool=DELEGATE, call=delegate)
        outcome = await planner.work(Planned(world), named(client, PLANNER), model, [own])
        agents: Mapping[str, float] = {}
        if self.judge is not None and done:
            judge = self.judge
            values = [await scored(judge, world, one.task, one.answer) for one, _ in done]
            agents = {WORKER: sum(values) / len(values)}
        metrics = added([outcome, *(worker for _, worker in done)])
        return replace(outcome, metrics={**metrics, "errands": float(len(done))}, agents=agents)

    def _loop(self, turns: int) -> ToolLoop:
        return ToolLoop(
            start=self.start, max_turns=turns, max_tokens=self.max_tokens, manager=self.manager
        )


def briefed(brief: str, task: str) -> tuple[Message, ...]:
    """What a worker is told of a task."""
    return ({"role": "user", "content": brief.replace("{task}", task)},)


def handed(arguments: Mapping[str, Any]) -> str:
    """The task that is handed over. Raises BadCall unless it is a text."""
    task = arguments.get("task")
    if not isinstance(task, str) or not task.strip():
        raise BadCall(f"delegate takes a task, not {sorted(arguments)}")
    return task


def named(client: AsyncOpenAI, agent: str) -> AsyncOpenAI:
    """The client, whose calls say which agent makes them."""
    return client.with_options(default_headers={HEADER: agent})


def added(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics of all agents together."""
    names = outcomes[0].metrics
    return {name: sum(outcome.metrics[name] for outcome in outcomes) for name in names}
