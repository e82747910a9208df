"""What every driver of a client shares: the task, its tool, and how a driver is run.

    python drive_NAME.py '[["CASE", "MODE", "http://HOST:PORT/s/SESSION"], ...]'

A driver plays each case with one unmodified client and prints `{CASE: {"answer", "looked"}}`.
It imports nothing of forge_jax: the client is all that speaks to the gateway.
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping

TASK = "What does the drawer hold? Use the tool look, then say it."
SYSTEM = "You help with drawers."
NOTE = "Looks a drawer up"
FOUND = "amber-7391"  # what the tool finds; no prompt has it before
MODEL = "scripted"
SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "deep": {"type": "boolean"}},
    "required": ["key", "deep"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "description": NOTE, "parameters": SCHEMA}

looked: list[object] = []  # arguments of every run of the tool


def look(key: str, deep: bool) -> str:
    """Looks a drawer up.

    Args:
        key: which one
        deep: to its bottom
    """
    looked.append({"key": key, "deep": deep})
    return f"There is {FOUND}."


def main(modes: Mapping[str, Callable[[str], str]]) -> None:
    """Plays the cases of the command line; `modes` take the session's root URL."""
    told = {}
    for case, mode, root in json.loads(sys.argv[1]):
        looked.clear()
        try:
            answer = modes[mode](root)
        except Exception:
            answer = traceback.format_exc()
        told[case] = {"answer": answer, "looked": list(looked)}
    print(json.dumps(told))
