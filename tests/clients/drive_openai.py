"""openai: Chat Completions and Responses by the official SDK, and an agent that sends again."""

import json
from functools import partial

from driving import FUNCTION, MODEL, SYSTEM, TASK, look, main
from openai import APIError, OpenAI
from openai.types.chat import ChatCompletionMessage

CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function", **FUNCTION}]


def client_of(root: str, timeout: float = 30.0) -> OpenAI:
    return OpenAI(base_url=f"{root}/v1", api_key="any", timeout=timeout)


def chat(root: str, stream: bool = False, timeout: float = 30.0, attempts: int = 1) -> str:
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    with client_of(root, timeout) as client:
        while True:
            for attempt in range(attempts):
                try:
                    reply = chat_reply(client, messages, stream)
                    break
                except APIError:  # of a stream that was cut: the SDK leaves this to its user
                    if attempt == attempts - 1:
                        raise
            messages.append(reply)
            if not reply.tool_calls:
                return reply.content
            for call in reply.tool_calls:
                result = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def chat_reply(client: OpenAI, messages: list, stream: bool) -> ChatCompletionMessage:
    asked = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
        done = events.get_final_completion()
    assert done.usage.total_tokens > done.usage.prompt_tokens > 0
    return done.choices[0].message


def responses(root: str, stream: bool = False, by_id: bool = False) -> str:
    given: list = [{"role": "user", "content": TASK}]
    previous = None
    with client_of(root) as client:
        while True:
            asked = {"model": MODEL, "input": given, "tools": TOOLS, "instructions": SYSTEM}
            if previous is not None:
                asked["previous_response_id"] = previous
            if stream:
                with client.responses.stream(**asked) as events:
                    for _ in events:
                        pass
                    reply = events.get_final_response()
            else:
                reply = client.responses.create(**asked)
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            results = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": look(**json.loads(call.arguments)),
                }
                for call in calls
            ]
            if by_id:
                given, previous = results, reply.id
            else:
                given += [*reply.output, *results]


main(
    {
        "chat": chat,
        "chat streamed": partial(chat, stream=True),
        "chat impatient": partial(chat, timeout=0.5),
        "chat resent": partial(chat, stream=True, attempts=2),
        "responses": responses,
        "responses streamed": partial(responses, stream=True),
        "responses by id": partial(responses, by_id=True),
    }
)
