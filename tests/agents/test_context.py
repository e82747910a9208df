"""A context changes by recorded operations only."""

import numpy as np
import pytest

from forge_jax.agents.context import Context


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
    before = Context().append({"role": "user", "content": "secret"})
    after = before.wipe("note")
    assert (after.messages, after.note) == ((), "note")
    assert after.append({"role": "user", "content": "x"}).note == "note"
    assert len(before.messages) == 1
