"""The laws of a session's record: each finds the fault that breaks it, and no other."""

import dataclasses
from typing import Any

import numpy as np

from experiments.client_laws import account, broken
from forge_jax.types import Branch, Finish, Lineage, Turn


def turn(prompt: list[int], output: list[int], **changed: Any) -> Turn:
    told: dict[str, Any] = {"temperature": 1.0, "finish": Finish.STOP, "parent": None, **changed}
    branch = Branch.ROOT if told["parent"] is None else Branch.CONTINUE
    told = {"lineage": Lineage(branch=branch), **told}
    return Turn(
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        logprobs=np.zeros(len(output), np.float32),
        versions=np.zeros(len(output), np.int32),
        start=0.0,
        seconds=0.0,
        queue_seconds=0.0,
        **told,
    )


FIRST = turn([0, 1, 2], [7, 8])
SECOND = turn([0, 1, 2, 7, 8, 9], [5], parent=0)
CUT = turn([0, 1, 2], [7], finish=Finish.ABORT)


def drawn(*turns: Turn) -> list[tuple[np.ndarray, list[int]]]:
    return [(turn.prompt, turn.output.tolist()) for turn in turns]


def test_every_token_has_one_place() -> None:
    greedy = turn([0, 1, 2, 7, 8, 9], [5], parent=1, temperature=0.0)
    told = account([CUT, FIRST, greedy])
    assert (told.calls, told.samples, told.branches) == (3, 1, ("root", "root", "continue"))
    assert (told.sampled, told.trained) == (4, 2)
    assert told.left_out == {"abandoned": 1, "greedy": 1}


def test_a_broken_law_is_told() -> None:
    whole = [FIRST, SECOND]
    assert broken(whole, drawn(*whole)) == []
    assert broken([CUT, *whole[:1]], drawn(CUT, FIRST)) == []
    [missing] = broken([FIRST], drawn(*whole))
    assert missing.startswith("1 completions drawn are not recorded, 0 ")
    [made_up] = broken(whole, drawn(FIRST))
    assert made_up.startswith("0 completions drawn are not recorded, 1 ")
    other = turn([0, 1, 2, 7, 7, 9], [5], parent=0)
    assert broken([FIRST, other], drawn(FIRST, other)) == [
        "turn 1 does not begin with its parent, turn 0"
    ]
    lost = dataclasses.replace(SECOND, parent=None)
    [unlike] = broken([FIRST, lost], drawn(FIRST, lost))
    assert unlike == "turn 1 is said to continue, and has no parent"
    assert broken([FIRST, FIRST], drawn(FIRST, FIRST)) == ["1 samples are trained on twice"]
