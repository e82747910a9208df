"""Agents that are functions, for `test_black_box`."""

import json
import os


async def answer(prompt: str) -> str:
    print("this is no answer")
    return json.dumps({"prompt": prompt, "pid": os.getpid(), "model": os.environ["MODEL"]})
