"""pydantic-ai: its agent over all three protocols."""

import asyncio
from functools import partial

from driving import MODEL, SYSTEM, TASK, look, main
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def openai(root: str, model: type) -> Model:
    return model(MODEL, provider=OpenAIProvider(base_url=f"{root}/v1", api_key="any"))


def anthropic(root: str) -> Model:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=root, api_key="any"))


def play(root: str, model_of: object, stream: bool = False) -> str:
    agent = Agent(model_of(root), instructions=SYSTEM, tools=[look])
    return asyncio.run(streamed(agent)) if stream else agent.run_sync(TASK).output


async def streamed(agent: Agent) -> str:
    """Node by node: `run_stream` ends at the first text, even before a tool call."""
    async with agent.iter(TASK) as running:
        async for node in running:
            if Agent.is_model_request_node(node):
                async with node.stream(running.ctx) as events:
                    async for _ in events:
                        pass
        return running.result.output


MODELS = {
    "chat": partial(openai, model=OpenAIChatModel),
    "responses": partial(openai, model=OpenAIResponsesModel),
    "messages": anthropic,
}
main(
    {name: partial(play, model_of=model) for name, model in MODELS.items()}
    | {f"{name} streamed": partial(play, model_of=m, stream=True) for name, m in MODELS.items()}
)
