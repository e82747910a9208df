"""Real clients, unmodified: each does a task of two steps over every protocol that it speaks.

Of each, every token drawn is recorded once, and every prompt begins with prompt and completion
of the call before wherever the client keeps its history. What it takes twice is one sample.
"""

import asyncio
import functools

import pytest
from playing import ANSWER, WANTED, Case, Played, played, rules

from experiments.client_laws import account, broken

FINAL = f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{ANSWER}"}}}}</tool_call>'
CODE = "Thought: look.\n<code>\n%s\n</code>"
SMOL = rules(answer=FINAL)
SMOL_CODE = rules(
    first=CODE % 'print(look(key="café", deep=True))', answer=CODE % f'final_answer("{ANSWER}")'
)
SEE = "cat drawer.txt; echo seen > seen.txt"
DONE = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{ANSWER}'"
BASH = 'I run it.\n<tool_call>{"name": "bash", "arguments": {"command" : "%s"}}</tool_call>'
MINI = rules(first=BASH % SEE, answer=BASH % DONE)
FENCE = "I run it.\n\n```mswea_bash_command\n%s\n```"
MINI_TEXT = rules(first=FENCE % SEE, answer=FENCE % DONE)

# Branches of the attempts at the first step; one that was refused leaves no turn.
FIRST_STEP = {
    "": ("root",),
    "refused": ("root",),
    "slow": ("root", "resent"),
    "cut": ("root", "resent"),
}
CASES = {
    "openai": (
        Case("chat"),
        Case("chat streamed"),
        Case("responses"),
        Case("responses streamed"),
        Case("responses by id"),
        Case("chat", fault="refused"),
        Case("chat impatient", fault="slow"),
        Case("chat resent", fault="cut"),
    ),
    "anthropic": (
        Case("messages"),
        Case("messages streamed"),
        Case("runner"),
        Case("runner streamed"),
        Case("messages", fault="refused"),
        Case("messages impatient", fault="slow"),
        Case("messages resent", fault="cut"),
    ),
    "litellm": (
        Case("chat"),
        Case("chat streamed"),
        Case("chat over messages"),
        Case("chat over messages streamed"),
        Case("responses"),
        Case("messages"),
        Case("chat", fault="refused"),
    ),
    "agents": (
        Case("chat"),
        Case("chat streamed"),
        Case("responses"),
        Case("responses streamed"),
        Case("responses", fault="refused"),
    ),
    "langgraph": (
        Case("chat"),
        Case("chat streamed"),
        Case("responses"),
        Case("responses streamed"),
        Case("messages"),
        Case("messages streamed"),
        Case("messages", fault="refused"),
    ),
    "pydantic_ai": (
        Case("chat"),
        Case("chat streamed"),
        Case("responses"),
        Case("responses streamed"),
        Case("messages"),
        Case("messages streamed"),
        Case("chat", fault="refused"),
    ),
    # Its history is text that the model never wrote: every call begins a branch.
    "smolagents": (
        Case("chat", SMOL, second="history_edited"),
        Case("chat streamed", SMOL, second="history_edited"),
        Case("messages", SMOL, second="history_edited"),
        Case("code", SMOL_CODE),
        Case("chat", SMOL, fault="refused", second="history_edited"),
    ),
    "mini_swe_agent": (
        Case("chat", MINI),
        Case("messages", MINI),
        Case("responses", MINI),
        Case("text", MINI_TEXT),
        Case("chat", MINI, fault="refused"),
    ),
}


@functools.cache
def outcomes(client: str) -> dict[str, Played]:
    return asyncio.run(played(client, CASES[client]))


@pytest.mark.parametrize(
    ("client", "number"),
    [
        pytest.param(client, number, id=f"{client}: {case.name}")
        for client, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_client_does_its_task(client: str, number: int) -> None:
    case = CASES[client][number]
    done = outcomes(client)[case.name]
    assert done.answer.strip() == ANSWER, done.answer
    assert done.looked == (["seen"] if client == "mini_swe_agent" else [WANTED])
    assert broken(done.turns, done.drawn) == []
    told = account(done.turns)
    print(told)
    abandoned = case.fault in ("cut", "slow")
    assert told.calls == 2 + abandoned
    assert told.samples == 2
    assert set(told.left_out) == ({"abandoned"} if abandoned else set())
    assert told.branches == (*FIRST_STEP[case.fault], case.second)
