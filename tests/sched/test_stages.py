"""Shares that change with the stage: each batch is whole, and what comes is known."""

import json
import math

import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.sched.stages import Stage, StagedShares

NAMES = ("calc", "qa", "hop")
STAGES = (
    Stage(shares=(1.0, 0.0, 0.0), until=4),
    Stage(shares=(0.25, 0.75, 0.0), until=9),
    Stage(shares=(0.3, 0.3, 0.4), until=None),
)


def staged() -> StagedShares:
    return StagedShares(NAMES, STAGES, batch=6)


def test_every_stage_has_its_shares_and_every_batch_is_whole() -> None:
    quotas = np.array([(one := staged()).quotas()] + [one.quotas() for _ in range(28)])
    assert np.all(quotas.sum(axis=1) == 6)
    for stage, (first, last) in zip(STAGES, ((0, 4), (4, 9), (9, 29)), strict=True):
        part = quotas[first:last]
        assert np.all(np.abs(part.sum(axis=0) - 6 * len(part) * np.array(stage.shares)) <= 3)
        assert np.all(part[:, np.array(stage.shares) == 0] == 0)


def test_what_is_to_come_of_a_stage_is_what_comes_but_for_less_than_an_item() -> None:
    for count in range(1, 10):
        one = staged()
        for _ in range(count):
            one.quotas()
        ends = 4 if count <= 4 else 9
        told = [one.coming(lane) for lane in range(3)]
        came = np.sum([np.zeros(3), *(one.quotas() for _ in range(ends - count))], axis=0)
        assert np.all(np.abs(told - came) <= 1), (count, told, came)
    one.quotas()
    assert [one.coming(lane) for lane in range(3)] == [math.inf] * 3


def test_the_least_of_a_lane_is_that_of_its_poorest_stage() -> None:
    assert staged().least == [1, 0, 0]


@pytest.mark.parametrize("after", [1, 4, 7, 12])
def test_a_restored_state_continues_exactly(after: int) -> None:
    one, other = staged(), staged()
    for _ in range(after):
        one.quotas()
    other.restore(json.loads(json.dumps(one.state())))
    for _ in range(9):
        assert other.quotas() == one.quotas()


def test_a_state_of_other_stages_is_refused() -> None:
    with pytest.raises(UserError, match="is not of 2 stages"):
        StagedShares(NAMES, STAGES[1:], batch=6).restore(staged().state())
    with pytest.raises(UserError, match="is not of 3 stages"):
        staged().restore({"unit": "items", "credit": [0.0] * 3})


def test_a_share_of_less_than_an_item_is_refused() -> None:
    stages = (Stage(shares=(0.9, 0.1, 0.0), until=None),)
    with pytest.raises(UserError, match=r"qa: share=0\.1 of batch=6 is less than an item"):
        StagedShares(NAMES, stages, batch=6)
