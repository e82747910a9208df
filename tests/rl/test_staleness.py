"""Measures of staleness: closed forms by hand, and what may not change them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_policy import make_turn

from forge_jax.rl.credit import turn_sample
from forge_jax.rl.hold import Held
from forge_jax.rl.staleness import effective, k3, staleness_row

LOGS = st.lists(st.floats(-20, 20), min_size=1, max_size=30)


@given(LOGS, st.floats(-500, 500))
def test_the_effective_size_is_a_share_and_has_no_scale(logs: list[float], by: float) -> None:
    found = effective(np.array(logs))
    assert 1 / len(logs) - 1e-12 <= found <= 1 + 1e-12
    assert effective(np.array(logs) + by) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 50])
def test_equal_weights_all_count_and_a_dominating_one_counts_alone(n: int) -> None:
    assert effective(np.full(n, -3.0)) == pytest.approx(1)
    assert effective(np.arange(n) * 700.0) == pytest.approx(1 / n)


def test_the_divergence_is_that_of_the_estimate_and_never_negative() -> None:
    logs = np.array([0.3, -1.2, 0.0])
    assert k3(logs) == pytest.approx(np.mean(np.exp(logs) - 1 - logs))
    assert k3(np.zeros(3)) == 0
    assert k3(np.array([800.0])) == np.inf


def test_a_row_by_hand() -> None:
    turns = [make_turn([5, 6], [1, 2], [3, 3]), make_turn([5], [7, 8], [4, 5])]
    samples = [turn_sample(turn, 1.0) for turn in turns]
    ratio = np.array([2.0, 0.5, 1.0, 4.0])  # the sampler's log-probs are 0
    order = np.array([3, 0, 2, 1])  # log-probs come in any order
    index = np.array([2, 3, 5, 6])[order]
    row = staleness_row(samples, turns, np.log(ratio)[order].astype(np.float32), index, 6)
    assert row["ess_token"] == pytest.approx(7.5**2 / (4 * (4 + 0.25 + 1 + 16)), rel=1e-6)
    assert row["ess_sample"] == pytest.approx((1 + 4) ** 2 / (2 * (1 + 16)), rel=1e-6)
    assert row["ess_mean"] == pytest.approx((1 + 2) ** 2 / (2 * (1 + 4)), rel=1e-6)
    assert row["ratio_p50"] == pytest.approx(np.quantile(ratio, 0.5), rel=1e-6)
    assert row["ratio_p999"] == pytest.approx(np.quantile(ratio, 0.999), rel=1e-6)
    assert row["ratio_p1"] == pytest.approx(np.quantile(ratio, 0.01), rel=1e-6)
    assert (row["age_mean"], row["age_max"]) == (2.25, 3)
    assert row["age_share"] == {"1": 0.25, "2": 0.25, "3": 0.5}
    assert row["age_gap"] == pytest.approx({"1": 3.0, "2": 0.0, "3": 0.75}, rel=1e-6)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_held_weights_come_late_by_so_many_updates(late: int) -> None:
    held, sampled = Held(late, last=9), 0
    for version in range(1, 9):
        weights = jnp.full(2, version)
        due = held.due(version, weights)
        if late:
            weights.delete()  # as the next update would
        if due is not None:
            sampled = due[0]
            assert due[1].tolist() == [sampled] * 2
        assert version - sampled == min(version, late)
    assert held.due(9, None) == (9, None)
