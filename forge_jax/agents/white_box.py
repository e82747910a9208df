"""White-box agents: loops that call a model over HTTP and act on what it says.

A task flows in, an `Outcome` with reward and metrics flows out. What the policy does
wrong (a bad call, no end, no answer) costs it reward and is never an error; what the
world does wrong is an EnvironmentFault; what the server does wrong propagates.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall, environment
from forge_jax.agents.limits import LIMITS, limited
from forge_jax.agents.protocol import Environment, Message, Tool, WindowedEnvironment
from forge_jax.types import Outcome, Status, Task


@dataclass
class Tally:
    """What happened in one episode so far; the `metrics` of its outcome."""

    turns: int = 0  # replies of the model
    completion_tokens: int = 0  # of those, as the server counts them
    tool_calls: int = 0
    malformed_calls: int = 0  # of those, the ones no tool could take
    tool_seconds: float = 0.0  # of every call by itself
    tool_path_seconds: float = 0.0  # in which at least one ran
    wipes: int = 0  # of the context
    unfinished: int = 0  # 1: the last reply was cut off at its limit

    def outcome(self, reward: float) -> Outcome:
        metrics = {name: float(value) for name, value in vars(self).items()}
        return Outcome(status=Status.COMPLETED, reward=reward, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class ToolLoop:
    """Lets the model call tools until it replies without a call; that reply is its answer.

    Reward 0 if it has not answered after `max_turns` replies, or does not end a reply
    within `max_tokens`.
    """

    start: Callable[[Task], Environment]
    max_turns: int
    max_tokens: int

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        with environment("reset"):
            world = self.start(task)
            context = Context().append(*world.messages)
            tools = world.tools
        tally = Tally()
        while tally.turns < self.max_turns:
            choice = await ask(client, model, context, tools, self.max_tokens, tally)
            if choice.finish_reason == "length":
                tally.unfinished = 1
                break
            if not choice.message.tool_calls:
                async with limited("score", LIMITS.get().verify):
                    return tally.outcome(await world.score(choice.message.content or ""))
            reply = choice.message.model_dump(exclude_none=True)
            context = context.append(reply)
            results = await use_tools(world, reply["tool_calls"], tally)
            context = context.append(*results)
        return tally.outcome(0.0)


@dataclass(frozen=True, kw_only=True)
class WindowLoop:
    """Shows the model one window after another, its context wiped between them but for a note.

    The reply to the last window is the answer. Reward 0 if a reply does not end within
    `max_tokens`.
    """

    start: Callable[[Task], WindowedEnvironment]
    max_tokens: int

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        with environment("reset"):
            world = self.start(task)
            last = world.windows - 1
        context, tally = Context(), Tally()
        for window in range(last + 1):
            with environment(f"window {window}"):
                context = context.append(*world.observe(window, context.note))
            choice = await ask(client, model, context, (), self.max_tokens, tally)
            if choice.finish_reason == "length":
                tally.unfinished = 1
                break
            reply = choice.message.content or ""
            if window == last:
                async with limited("score", LIMITS.get().verify):
                    return tally.outcome(await world.score(reply))
            with environment(f"window {window}"):
                context = context.wipe(world.keep(reply))
            tally.wipes = context.count("wipe")
        return tally.outcome(0.0)


async def ask(
    client: AsyncOpenAI,
    model: str,
    context: Context,
    tools: Iterable[Tool],
    max_tokens: int,
    tally: Tally,
) -> Choice:
    """One call of the model, counted in `tally`.

    Temperature and seed are the server's: it knows the session.
    Raises openai.APIError where the call fails.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": context.messages,
        "max_tokens": max_tokens,
    }
    if tools:
        body["tools"] = tools
    # `chat.completions.create` walks every message through its TypedDicts first, which is
    # about half of the client's time in a call and changes nothing here.
    completion = await client.post("/chat/completions", body=body, cast_to=ChatCompletion)
    tally.turns += 1
    tally.completion_tokens += completion.usage.completion_tokens if completion.usage else 0
    return completion.choices[0]


async def use_tools(
    world: Environment, calls: Sequence[dict[str, Any]], tally: Tally
) -> list[Message]:
    """What answers the calls of one reply, in their order; they run at once."""
    began = time.perf_counter()
    running = [asyncio.ensure_future(use_tool(world, call, tally)) for call in calls]
    try:
        results = await asyncio.gather(*running)
    finally:  # where one raised, none of the others goes on
        for one in running:
            one.cancel()
        tally.tool_path_seconds += time.perf_counter() - began
    return [tool_message(call["id"], text) for call, text in zip(calls, results, strict=True)]


async def use_tool(world: Environment, call: dict[str, Any], tally: Tally) -> str:
    """The result of a call in a reply, or what was wrong with it."""
    tally.tool_calls += 1
    began = time.perf_counter()
    try:
        name, arguments = parsed(call)
        async with limited(f"tool {name}", LIMITS.get().tool):
            return await world.call(name, arguments)
    except BadCall as error:
        tally.malformed_calls += 1
        return str(error)
    finally:
        tally.tool_seconds += time.perf_counter() - began


def parsed(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call. Raises BadCall unless it is a function of a JSON object."""
    if call["type"] != "function":
        raise BadCall(f"a call of type {call['type']} is not a function call")
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError as error:
        raise BadCall(f"arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise BadCall("arguments are not a JSON object")
    return call["function"]["name"], arguments


def tool_message(identifier: str, result: str) -> Message:
    """The message that answers a tool call."""
    return {"role": "tool", "tool_call_id": identifier, "content": result}
