"""A context changes by recorded operations only."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forge_jax.agents.context import DROPPED, Context, told
from forge_jax.agents.scripting import calling, saying
from forge_jax.agents.white_box import tool_message

Operate = Callable[[Context], Context]
OPERATIONS: dict[str, Operate] = {
    "drop_oldest": lambda c: c.drop_oldest(2),
    "drop_tool_results": lambda c: c.drop_tool_results(1),
    "truncate": lambda c: c.truncate(3),
    "summarise": lambda c: c.summarise("short"),
    "fold": lambda c: c.fold("found"),
    "note": lambda c: c.take_note("noted"),
}
TASK = {"role": "user", "content": "the task"}


def rounds(context: Context, count: int) -> Context:
    """With so many more replies and results of tools."""
    for number in range(count):
        call = calling("look", {"at": str(number)})
        context = context.append(call).append(tool_message("call_0", f"result {number}"))
    return context


def texts(context: Context) -> list[Any]:
    return [m.get("content") or m["tool_calls"][0]["function"]["name"] for m in context.messages]


@pytest.mark.parametrize("seed", range(5))
def test_operations_replay_to_the_same_context(seed: int) -> None:
    rng = np.random.default_rng(seed)
    context, states = Context(), []
    for step in range(20):
        if rng.random() < 0.3:
            context = context.wipe(f"note {step}")
        else:
            context = context.append({"role": "user", "content": str(step)})
        states.append(len(context.messages))
    assert [operation.messages for operation in context.operations] == states
    assert context.count("append") + context.count("wipe") == 20


def test_a_wipe_leaves_the_note_and_nothing_else() -> None:
    before = Context.begun([{"role": "user", "content": "secret"}])
    after = before.wipe("note")
    assert (after.messages, after.note) == ((), "note")
    assert after.append({"role": "user", "content": "x"}).note == "note"
    assert len(before.messages) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_the_task_stays_and_every_result_has_its_call(seed: int) -> None:
    rng = np.random.default_rng(seed)
    context = Context.begun([TASK])
    for _ in range(12):
        context = rounds(context, int(rng.integers(0, 4)))
        name = str(rng.choice(list(OPERATIONS)))
        before, context = context, OPERATIONS[name](context)
        assert context.operations[: len(before.operations)] == before.operations
        assert context.operations[-1].name == name
        assert context.operations[-1].messages == len(context.messages)
        assert context.characters <= before.characters + len("found") + len("noted")
        assert (context.messages[0], context.since) == (TASK, 0)
        for place, message in enumerate(context.messages):
            if message["role"] == "tool":
                assert "tool_calls" in context.messages[place - 1]


def test_the_oldest_rounds_go_and_the_note_takes_their_place() -> None:
    full = rounds(Context.begun([TASK]), 3)
    assert texts(full.drop_oldest(1)) == ["the task", "look", "result 2"]
    assert full.drop_oldest(3).messages == full.messages
    noted = full.take_note("noted")
    assert noted.messages == full.messages
    assert texts(noted.drop_oldest(9))[:3] == ["the task", "noted", "look"]
    assert texts(noted.drop_oldest(0)) == ["the task", "noted"]
    again = rounds(noted.drop_oldest(1).take_note("more"), 1).drop_oldest(1)
    assert texts(again) == ["the task", "more", "look", "result 0"]


def test_old_results_and_long_texts_are_cut_but_never_what_the_model_said() -> None:
    full = rounds(Context.begun([TASK]), 2).append(saying("I see it all"))
    results = full.drop_tool_results(1)
    assert texts(results) == ["the task", "look", DROPPED, "look", "result 1", "I see it all"]
    assert texts(full.truncate(3)) == ["the task", "look", "res", "look", "res", "I see it all"]
    assert full.drop_tool_results(2).messages == full.truncate(99).messages == full.messages


def test_a_summary_replaces_the_one_before_and_results_of_folds_add_up() -> None:
    full = rounds(Context.begun([TASK]), 2)
    once = rounds(full.summarise("first"), 1)
    assert texts(once) == ["the task", "first", "look", "result 0"]
    assert texts(once.summarise("second")) == ["the task", "second"]
    folded = rounds(full.fold("one"), 2).fold("two")
    assert texts(folded) == ["the task", "one", "two"]
    assert folded.messages[-1] == told("two")
    assert texts(rounds(folded, 3).drop_oldest(0)) == ["the task", "one", "two"]


def test_replies_are_counted_since_something_was_done() -> None:
    context = rounds(Context.begun([TASK]), 3)
    assert context.since == 3
    assert context.append(told("x")).since == 3
    assert rounds(context.truncate(5), 1).since == 1
