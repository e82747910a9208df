"""Calls a function as a black-box agent: in a process of its own, like any program.

    python process_call.py module:function '["folder", ...]'

The folders are where modules are looked for. The function is called with the prompt, which is
stdin, and its text is the answer, the only thing on stdout: what it prints goes to stderr. It finds
the model in its environment, as a program does. Not in a thread of the trainer: a thread shares
environment, memory and working folder with every other episode, and cannot be ended.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable


def loaded(target: str) -> Callable[[str], object]:
    """The function of "module:function"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def call(function: Callable[[str], object]) -> None:
    """Calls `function` once with what is in stdin, and writes its text to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = function(sys.stdin.read())
    if inspect.iscoroutine(answer):
        answer = asyncio.run(answer)
    if not isinstance(answer, str):
        raise TypeError(f"{function} returned {answer!r}, not a text")
    answers.write(answer)
    answers.flush()


def main() -> None:
    target, folders = sys.argv[1], json.loads(sys.argv[2])
    sys.path[:] = folders
    call(loaded(target))


if __name__ == "__main__":
    main()
