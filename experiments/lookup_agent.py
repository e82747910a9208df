"""The agent that +experiment=blackbox trains: an agent of openai-agents with one tool.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python -m experiments.lookup_agent

A program as its authors would write it, which knows nothing of forge_jax: the user's text, from
stdin, is the whole prompt, the tool reads files of the working folder, and the loop is the
library's own. Its answer goes to stdout.
"""

import asyncio
import os
import sys
from pathlib import Path

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MAX_TURNS = 6
MAX_TOKENS = 4  # of one reply

set_tracing_disabled(True)
HTTP = DefaultAsyncHttpxClient(timeout=None)  # its certificates take longer to read than an episode


@function_tool
def lookup(key: str) -> str:
    """Looks up a key: the next key, a digit at the end, - where there is none."""
    return Path(key).read_text() if key in os.listdir() else "-"


async def answer(prompt: str) -> str:
    """Lets the model call the tool until it answers; no text where it does not."""
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI(http_client=HTTP))
    settings = ModelSettings(max_tokens=MAX_TOKENS)
    agent = Agent(name="lookup", tools=[lookup], model=model, model_settings=settings)
    try:
        return (await Runner.run(agent, prompt, max_turns=MAX_TURNS)).final_output
    except MaxTurnsExceeded:
        return ""


if __name__ == "__main__":
    print(asyncio.run(answer(sys.stdin.read())))
