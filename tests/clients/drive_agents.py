"""openai-agents: its runner over Responses and Chat Completions."""

import asyncio
from functools import partial

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from driving import MODEL, SYSTEM, TASK, look, main
from openai import AsyncOpenAI

set_tracing_disabled(True)


def play(root: str, model: type, stream: bool = False) -> str:
    return asyncio.run(_play(root, model, stream))


async def _play(root: str, model: type, stream: bool) -> str:
    async with AsyncOpenAI(base_url=f"{root}/v1", api_key="any") as client:
        agent = Agent(
            name="helper",
            instructions=SYSTEM,
            tools=[function_tool(look)],
            model=model(MODEL, client),
        )
        if not stream:
            return (await Runner.run(agent, TASK)).final_output
        running = Runner.run_streamed(agent, TASK)
        async for _ in running.stream_events():
            pass
        return running.final_output


main(
    {
        "chat": partial(play, model=OpenAIChatCompletionsModel),
        "chat streamed": partial(play, model=OpenAIChatCompletionsModel, stream=True),
        "responses": partial(play, model=OpenAIResponsesModel),
        "responses streamed": partial(play, model=OpenAIResponsesModel, stream=True),
    }
)
