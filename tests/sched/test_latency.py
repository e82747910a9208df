"""Latencies: every model has the mean it says, and a pool's episodes are read as they were."""

import dataclasses

import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.sched.latency import Bimodal, Latency, Light, LogNormal, Measured, Pareto, recorded
from forge_jax.types import Episode, Finish, Outcome, Status, Task, Turn

MODELS = [
    Light(mean=3.0),
    LogNormal(mean=3.0),
    Pareto(mean=3.0, alpha=3.0),
    Bimodal(mean=3.0),
    Measured(seconds=(1.0, 2.0, 6.0)),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_a_model_has_its_mean(model: Latency) -> None:
    drawn = model.draw(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(3.0, rel=0.03)
    assert drawn.min() > 0
    assert np.isfinite(drawn).all()


def test_tails_are_as_heavy_as_their_names() -> None:
    rng = np.random.default_rng(0)
    tails = [np.quantile(m.draw(100_000, rng), 0.999) for m in (Light(), LogNormal(), Pareto())]
    assert tails == sorted(tails)
    assert tails[-1] > 15


def turn(start: float, seconds: float, tokens: int) -> Turn:
    return Turn(
        prompt=np.zeros(1, np.int32), output=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32), versions=np.zeros(tokens, np.int32),
        temperature=1.0, finish=Finish.STOP, parent=None, start=start, seconds=seconds,
        queue_seconds=0.0,
    )  # fmt: skip


def episode(family: str, *turns: Turn) -> Episode:
    return Episode(
        item=0, replica=0, task=Task(family=family, seed=0),
        outcome=Outcome(status=Status.COMPLETED), turns=turns,
    )  # fmt: skip


def test_a_group_takes_as_long_as_its_slowest_episode() -> None:
    slow = episode("notes", turn(0.0, 1.0, 5), turn(4.0, 2.0, 7))  # 3 s in calls, 3 s in tools
    quick = episode("notes", turn(0.0, 1.5, 3))
    items = recorded([(quick, slow), (episode("hop"),), (episode("hop", turn(0.5, 0.5, 2)),)])
    assert items.compute.tolist() == [3.0, 0.5]
    assert items.tool.tolist() == [3.0, 0.5]
    assert items.length.tolist() == [15.0, 2.0]
    assert [items.names[d] for d in items.domain] == ["notes", "hop"]
    side_by_side = recorded([(episode("hop", turn(0.0, 2.0, 1), turn(0.0, 2.0, 1)),)])
    assert (side_by_side.compute[0], side_by_side.tool[0]) == (2.0, 0.0)
    with pytest.raises(UserError, match="no group has a call"):
        recorded([(episode("hop"),)])


def test_measurements_that_cannot_be_are_refused() -> None:
    for bad in ((), (1.0, 0.0), (float("nan"),)):
        with pytest.raises(ValueError, match="seconds"):
            Measured(seconds=bad)
    assert dataclasses.asdict(Measured(seconds=(1.0,))) == {"seconds": (1.0,)}
