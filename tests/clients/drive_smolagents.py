"""smolagents: its agent of tool calls and its agent of code, which flatten history to text."""

from functools import partial

from driving import MODEL, TASK, look, main
from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel


def play(root: str, kind: type = ToolCallingAgent, stream: bool = False) -> str:
    model = OpenAIModel(model_id=MODEL, api_base=f"{root}/v1", api_key="any")
    return run(model, kind, stream)


def messages(root: str) -> str:
    return run(LiteLLMModel(f"anthropic/{MODEL}", api_base=root, api_key="any"), ToolCallingAgent)


def run(model: object, kind: type, stream: bool = False) -> str:
    agent = kind(
        tools=[tool(look)],
        model=model,
        stream_outputs=stream,
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    if not stream:
        return agent.run(TASK)
    *_, last = agent.run(TASK, stream=True)
    return last.output


main(
    {
        "chat": play,
        "chat streamed": partial(play, stream=True),
        "code": partial(play, kind=CodeAgent),
        "messages": messages,
    }
)
