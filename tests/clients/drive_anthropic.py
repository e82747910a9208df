"""anthropic: Messages by the official SDK, its tool runner, and an agent that sends again."""

from functools import partial

from anthropic import Anthropic, beta_tool
from driving import MODEL, NOTE, SCHEMA, SYSTEM, TASK, look, main

TOOLS = [{"name": "look", "description": NOTE, "input_schema": SCHEMA}]


def messages(root: str, stream: bool = False, timeout: float = 30.0, attempts: int = 1) -> str:
    talk: list = [{"role": "user", "content": TASK}]
    with Anthropic(base_url=root, api_key="any", timeout=timeout) as client:
        while True:
            for attempt in range(attempts):
                try:
                    reply = reply_of(client, talk, stream)
                    break
                except (
                    Exception
                ):  # a cut stream's, which the SDK lets through as its transport raised it
                    if attempt == attempts - 1:
                        raise
            talk.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": look(**block.input)}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                return reply.content[0].text
            talk.append({"role": "user", "content": results})


def reply_of(client: Anthropic, talk: list, stream: bool):
    asked = {"model": MODEL, "max_tokens": 400, "messages": talk, "tools": TOOLS}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    if not stream:
        return client.messages.create(**asked, system=system)
    with client.messages.stream(**asked, system=system) as events:
        return events.get_final_message()


def runner(root: str, stream: bool = False) -> str:
    with Anthropic(base_url=root, api_key="any") as client:
        talk = [{"role": "user", "content": TASK}]
        running = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=400, messages=talk, tools=[beta_tool(look)], stream=stream
        )
        for reply in running:
            last = reply.get_final_message() if stream else reply
        return last.content[0].text


main(
    {
        "messages": messages,
        "messages streamed": partial(messages, stream=True),
        "messages impatient": partial(messages, timeout=0.5),
        "messages resent": partial(messages, stream=True, attempts=2),
        "runner": runner,
        "runner streamed": partial(runner, stream=True),
    }
)
