"""Agents that are functions, for tests of black-box agents."""

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path

HERE = {"pid": os.getpid(), "random": random.random(), "calls": 0}


async def answer(prompt: str) -> str:
    print("this is no answer")
    return json.dumps({"prompt": prompt, "pid": os.getpid(), "model": os.environ["MODEL"]})


def remember(prompt: str) -> str:
    """What the process knows: of itself, of where it was imported, and of earlier calls."""
    HERE["calls"] += 1
    return json.dumps(
        {
            "imported": HERE["pid"],
            "pid": os.getpid(),
            "calls": HERE["calls"],
            "random": random.random(),
            "folder": sorted(os.listdir()),
            "handles": len(os.listdir("/proc/self/fd")),
            "environment": dict(os.environ),
        }
    )


def scatter(prompt: str) -> str:
    """Leaves its process group twice over, ignores to be asked to end, and never ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
            break
    os.environ["MARK"] = prompt
    os.execvp("sleep", ["sleep", prompt])


def stray(prompt: str) -> str:
    """Leaves a process behind."""
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", prompt])
    return "done"


def fails(prompt: str) -> str:
    raise RuntimeError(f"no {prompt}")


def broken(prompt: str) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return ""


async def waits(prompt: str) -> str:
    Path("began").touch()
    await asyncio.sleep(600)
    return ""
