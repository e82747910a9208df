r"""A program with one tool that keeps only the beginning and the end of its conversation.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... [FRAME=TEXT] \
      python -m experiments.head_tail_agent

It knows nothing of forge_jax: the user's text, from stdin, is the prompt, behind FRAME as what
the system says; the tool reads files of the working folder. From the fifth reply on, of all
rounds the model sees the first one and the two newest. Its answer goes to stdout.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_TURNS = 14
MAX_TOKENS = 4  # of one reply
WHOLE, TAIL = 4, 2  # rounds up to which nothing is left out, and the newest ones that stay then
LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up a key: the next key, a digit at the end, - where there is none.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


def answer(prompt: str) -> str:
    """Lets the model call the tool until it answers; no text where it does not."""
    client, frame = OpenAI(max_retries=0, timeout=None), os.environ.get("FRAME")
    head: list[Any] = [] if frame is None else [{"role": "system", "content": frame}]
    head.append({"role": "user", "content": prompt})
    rounds: list[list[Any]] = []
    for _ in range(MAX_TURNS):
        messages = head + [message for one in shown(rounds) for message in one]
        completion = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"],
            messages=messages,
            tools=[LOOKUP],
            max_tokens=MAX_TOKENS,
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": looked_up(call)}
            for call in reply.tool_calls
        ]
        rounds.append([reply.model_dump(exclude_none=True), *results])
    return ""


def shown(rounds: list[list[Any]]) -> list[list[Any]]:
    """The rounds that the model still sees."""
    return rounds if len(rounds) <= WHOLE else [rounds[0], *rounds[-TAIL:]]


def looked_up(call: Any) -> str:
    """What the file of a key holds."""
    try:
        key = json.loads(call.function.arguments)["key"]
    except (ValueError, LookupError, TypeError):
        return "that is no call of lookup"
    return Path(key).read_text() if key in os.listdir() else "-"


if __name__ == "__main__":
    print(answer(sys.stdin.read()))
