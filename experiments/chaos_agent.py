"""A program to be trained while it is killed and stopped: asks the model once, prints its reply.

Its prompt is stdin; it finds the model in its environment, and needs nothing but Python.
"""

import json
import os
import sys
import urllib.request

MAX_TOKENS = 4  # of the reply


def answer(prompt: str) -> str:
    """What the model replies to `prompt`."""
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": prompt[:8]}],
        "max_tokens": MAX_TOKENS,
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as reply:
        message = json.load(reply)["choices"][0]["message"]
    return str(message["content"] or "")


if __name__ == "__main__":
    print(answer(sys.stdin.read()))
