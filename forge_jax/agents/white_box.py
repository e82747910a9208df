"""White-box agents: loops that call a model over HTTP and act on what it says.

A task flows in, an `Outcome` with reward and metrics flows out. What the policy does
wrong (a bad call, no end, no answer) costs it reward and is never an error; what the
world does wrong is an EnvironmentFault; what the server does wrong propagates.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, RequestOptions
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall, environment
from forge_jax.agents.limits import scored, used
from forge_jax.agents.manager import Manager, Meter
from forge_jax.agents.own_tools import Choices, OwnTool, offered
from forge_jax.agents.protocol import Environment, Message, Tool, WindowedEnvironment
from forge_jax.agents.tally import Tally
from forge_jax.restarts import FIRST_WAIT, TRIES
from forge_jax.types import Outcome, Task


@dataclass(frozen=True, kw_only=True)
class ToolLoop:
    """Lets the model call tools until it replies without a call; that reply is its answer.

    Reward 0 if it has not answered after `max_turns` replies, or does not end a reply
    within `max_tokens`, or its context goes beyond the budget that `manager` has.
    """

    start: Callable[[Task], Environment]
    max_turns: int  # texts that the manager asks for are not counted
    max_tokens: int
    manager: Manager = field(default_factory=Manager)  # of the context

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        with environment("reset"):
            world = self.start(task)
        return await self.work(world, client, model)

    async def work(
        self, world: Environment, client: AsyncOpenAI, model: str, own: Sequence[OwnTool] = ()
    ) -> Outcome:
        """The outcome in a world; `own` are offered beside the tools of the world."""
        tally, choices = Tally(), Choices(self.manager)
        own = (*own, *choices.tools)
        with environment("reset"):
            context = Context.begun(world.messages)
            tools = offered(world.tools, own)
        line = Line(client=client, model=model, tools=tools, manager=self.manager, tally=tally)
        while tally.turns - tally.written < self.max_turns:
            choice = await line.ask(context, self.max_tokens)
            if choice is None:
                break
            if choice.finish_reason == "length":
                tally.unfinished = 1
                break
            if not choice.message.tool_calls:
                return tally.outcome(await scored(world.score, choice.message.content or ""))
            reply = choice.message.model_dump(exclude_none=True)
            context = context.append(reply)
            results = await use_tools(world, reply["tool_calls"], tally, own)
            context = choices.applied(context.append(*results), tally)
            context = await line.managed(context, self.max_tokens)
        return tally.outcome(0.0)


@dataclass
class Line:
    """Calls of one conversation: asks the model, and keeps the context small between its turns."""

    client: AsyncOpenAI
    model: str
    tools: tuple[Tool, ...]
    manager: Manager
    tally: Tally
    meter: Meter = field(default_factory=Meter)

    async def ask(self, context: Context, max_tokens: int) -> Choice | None:
        """A reply; None where the context is beyond the budget, and nothing is asked."""
        if self.manager.overflows(context, self.meter):
            self.tally.overflowed = 1
            return None
        completion = await ask(self.client, self.model, context, self.tools, max_tokens, self.tally)
        if completion.usage is not None:
            self.meter = self.meter.counted(context, completion.usage.prompt_tokens)
        return completion.choices[0]

    async def managed(self, context: Context, max_tokens: int) -> Context:
        """The context of the next call. A text for it that does not end is taken as it is."""
        if self.manager.due(context, self.meter):
            text, request = "", self.manager.request(context)
            if request is not None:
                limit = self.manager.cfg.max_tokens or max_tokens
                choice = await self.ask(request, limit)
                if choice is None:
                    return request  # beyond the budget, as the next call will find
                self.tally.written += 1
                text = choice.message.content or ""
            self.tally.shortened += 1
            context = self.manager.applied(context, text)
        return context


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
            completion = await ask(client, model, context, (), self.max_tokens, tally)
            choice = completion.choices[0]
            if choice.finish_reason == "length":
                tally.unfinished = 1
                break
            reply = choice.message.content or ""
            if window == last:
                return tally.outcome(await scored(world.score, reply))
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
) -> ChatCompletion:
    """One call of the model, counted in `tally`.

    Temperature and seed are the server's: it knows the session. A call whose connection is refused
    or lost is made again, since a server that is begun again is away for a moment. The latter says
    so: of both at most one is a sample. Raises openai.APIError where the call fails.
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
    completion = await sent(client, body)
    tally.turns += 1
    if completion.usage:
        tally.completion_tokens += completion.usage.completion_tokens
        tally.prompt_tokens += completion.usage.prompt_tokens
    return completion


async def sent(client: AsyncOpenAI, body: Mapping[str, Any]) -> ChatCompletion:
    """The answer to a call, over at most `TRIES` connections. Raises openai.APIError: that of the
    last one where all were refused or lost, any other at once."""
    tries = had = 0  # attempts before this one; of these, what the server may have had
    while True:
        # Else a retry of what was refused would give up an earlier call that asked the same.
        options = RequestOptions(headers={"x-stainless-retry-count": str(had)})
        try:
            return await client.post(
                "/chat/completions", body=body, cast_to=ChatCompletion, options=options
            )
        except APIConnectionError as error:
            if isinstance(error, APITimeoutError) or tries + 1 == TRIES:
                raise
            had += not isinstance(error.__cause__, httpx.ConnectError)
        tries += 1
        await asyncio.sleep(FIRST_WAIT * 2**tries)


async def use_tools(
    world: Environment,
    calls: Sequence[dict[str, Any]],
    tally: Tally,
    own: Sequence[OwnTool] = (),
) -> list[Message]:
    """What answers the calls of one reply, in their order; they run at once."""
    tally.calling_replies += 1
    tally.parallel_replies += len(calls) > 1
    running = [asyncio.ensure_future(use_tool(world, call, tally, own)) for call in calls]
    try:
        results = await asyncio.gather(*running)
    finally:  # where one raised, none of the others goes on
        for one in running:
            one.cancel()
    tally.tool_path_seconds += max(seconds for _, seconds in results)
    texts = [text for text, _ in results]
    return [tool_message(call["id"], text) for call, text in zip(calls, texts, strict=True)]


async def use_tool(
    world: Environment, call: dict[str, Any], tally: Tally, own: Sequence[OwnTool]
) -> tuple[str, float]:
    """The result of a call in a reply, or what was wrong with it; how long the world took."""
    tally.tool_calls += 1
    began = time.perf_counter()
    try:
        name, arguments = parsed(call)
        for one in own:
            if one.name == name:
                return await one.call(arguments), 0.0
        result = await used(world.call, name, name, arguments)
    except BadCall as error:
        tally.malformed_calls += 1
        result = str(error)
    seconds = time.perf_counter() - began
    tally.tool_seconds += seconds
    return result, seconds


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
