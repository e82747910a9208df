"""A configuration's queue: the policy it names, and a window no wider than its lag budget."""

from typing import Any

import pytest

from forge_jax.config import SchedConfig
from forge_jax.rl.queueing import new_policy
from forge_jax.sched.policies import (
    GreedyDrop,
    Policy,
    Stream,
    VersionWindow,
    Window,
    fifo,
    greedy,
)
from forge_jax.sched.queue import Queue

N = 16


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        ({}, Window(in_flight=N, window=4)),
        ({"window": 0.5}, Window(in_flight=N, window=8)),
        ({"window": 1.0}, Window(in_flight=N, window=16)),
        ({"window": 1}, Window(in_flight=N, window=1)),
        ({"window": None}, greedy(N)),
        ({"in_flight": 20, "policy": "fifo"}, fifo(20)),
        ({"policy": "greedy"}, greedy(N)),
        ({"policy": "greedy_drop", "drop_updates": 0}, GreedyDrop(in_flight=N, max_updates=0)),
        ({"policy": "versions", "versions": 0}, VersionWindow(in_flight=N, versions=0)),
        ({"policy": "stream", "buffer": 3}, Stream(running=N, buffer=3)),
    ],
    ids=str,
)
def test_a_name_is_a_policy(values: dict[str, Any], policy: Policy) -> None:
    assert new_policy(SchedConfig(**values)) == policy


@pytest.mark.parametrize(
    ("window", "bound"), [(None, 23), ("auto", 23), (8, 23), (4, 19), (0.25, 19)]
)
def test_a_window_is_narrowed_to_keep_a_lag(window: int | float | str | None, bound: int) -> None:
    """N + W - 1 < 3 updates of 8 items; it is 16 + 8 - 1."""
    sched = SchedConfig(batch=8, in_flight=16, window=window, lag_updates=3)
    queue = Queue(new_policy(sched), batch=8)
    assert queue.lag_bound == bound
    assert queue.bounds is not None
    assert queue.bounds.updates <= 3
