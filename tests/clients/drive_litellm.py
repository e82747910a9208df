"""litellm: one interface in front of all three protocols."""

import asyncio
import json
from functools import partial

import litellm
from driving import FUNCTION, MODEL, SYSTEM, TASK, look, main

TOOLS = [{"type": "function", "function": FUNCTION}]


def chat(root: str, provider: str = "openai", stream: bool = False) -> str:
    base = f"{root}/v1" if provider == "openai" else root
    talk: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    while True:
        reply = litellm.completion(
            f"{provider}/{MODEL}",
            messages=talk,
            tools=TOOLS,
            stream=stream,
            api_base=base,
            api_key="any",
            num_retries=2,
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=talk)
        message = reply.choices[0].message
        talk.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = look(**json.loads(call.function.arguments))
            talk.append(
                {"role": "tool", "tool_call_id": call.id, "name": "look", "content": result}
            )


def responses(root: str) -> str:
    given: list = [{"role": "user", "content": TASK}]
    while True:
        reply = litellm.responses(
            input=given,
            model=f"openai/{MODEL}",
            tools=[{"type": "function", **FUNCTION}],
            instructions=SYSTEM,
            api_base=f"{root}/v1",
            api_key="any",
        )
        items = [item.model_dump() for item in reply.output]
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls:
            return items[-1]["content"][0]["text"]
        given += items
        for call in calls:
            result = look(**json.loads(call["arguments"]))
            given.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            )


def messages(root: str) -> str:
    """litellm's own Messages interface."""
    return asyncio.run(_messages(root))


async def _messages(root: str) -> str:
    talk: list = [{"role": "user", "content": TASK}]
    while True:
        reply = await litellm.anthropic.messages.acreate(
            model=f"anthropic/{MODEL}",
            messages=talk,
            max_tokens=400,
            tools=[{"name": "look", "input_schema": FUNCTION["parameters"]}],
            api_base=root,
            api_key="any",
        )
        talk.append({"role": "assistant", "content": reply["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": look(**block["input"])}
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        if not results:
            return reply["content"][0]["text"]
        talk.append({"role": "user", "content": results})


main(
    {
        "chat": chat,
        "chat streamed": partial(chat, stream=True),
        "chat over messages": partial(chat, provider="anthropic"),
        "chat over messages streamed": partial(chat, provider="anthropic", stream=True),
        "responses": responses,
        "messages": messages,
    }
)
