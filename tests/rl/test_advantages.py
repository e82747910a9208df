"""Laws of returns, baselines and step groups."""

import numpy as np
import pytest

from forge_jax.rl.advantages import (
    BASELINES,
    advantages,
    constant,
    deviation,
    leave_one_out,
    step_advantages,
    to_go,
    turn_leave_one_out,
)


def random_seen(rng: np.random.Generator, n: int = 5, most: int = 4) -> np.ndarray:
    """Returns of siblings without rewards that compare them: every row is the same."""
    returns = rng.normal(size=(n, most)) * (np.arange(most) < rng.integers(1, most + 1, (n, 1)))
    return np.broadcast_to(returns, (n, n, most))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_are_discounted_sums_of_what_comes_later(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 6))
    rewards, times = rng.normal(size=size), np.sort(rng.random(size) * 50)
    want = [sum(gamma ** (times[k] - times[t]) * rewards[k] for k in range(t, size))
            for t in range(size)]  # fmt: skip
    np.testing.assert_allclose(to_go(rewards, times, gamma), want, rtol=1e-12)


@pytest.mark.parametrize("name", ["leave_one_out", "turn", "none"])
def test_a_baseline_without_bias_does_not_move_with_its_own_episode(name: str) -> None:
    seen = np.array(random_seen(np.random.default_rng(0)))
    moved = seen.copy()
    moved[:, 2] += 7.0  # what episode 2 got, as all see it
    before, after = BASELINES[name](seen), BASELINES[name](moved)
    np.testing.assert_allclose(after[2], before[2], rtol=1e-12)
    own = BASELINES["group"]
    np.testing.assert_allclose(own(moved)[2] - own(seen)[2], 7.0 / 5)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    seen = random_seen(np.random.default_rng(1))
    for i in range(5):
        others = [j for j in range(5) if j != i]
        np.testing.assert_allclose(leave_one_out(seen)[i, 0], seen[0, others, 0].mean())
        np.testing.assert_allclose(turn_leave_one_out(seen)[i], seen[0, others].mean(axis=0))


def test_the_group_mean_shrinks_the_advantage_of_leave_one_out() -> None:
    seen = random_seen(np.random.default_rng(2))
    whole = advantages(seen, BASELINES["leave_one_out"], whole=True)
    shrunk = advantages(seen, BASELINES["group"], whole=True)
    np.testing.assert_allclose(shrunk, whole * 4 / 5, atol=1e-12)
    assert (whole == whole[:, :1]).all()


def test_returns_that_are_all_equal_carry_no_signal() -> None:
    seen = np.broadcast_to(np.array([[1.0, 0.3], [1.0 + 1e-7, 0.9]]), (2, 2, 2))
    assert constant(seen)
    assert constant(seen[:1, :1])
    assert not constant(seen + np.array([[0.0], [1e-5]]))
    assert deviation(np.array([2.0])) == 1.0
    assert deviation(np.array([2.0, 2.0])) > 0


def test_calls_are_compared_with_calls_of_the_same_state() -> None:
    first, second = step_advantages(
        [np.array([3.0, 1.0, 5.0]), np.array([0.0, 2.0])], [["a", "b", "c"], ["a", "b"]]
    )
    np.testing.assert_allclose(first, [1.5, -0.5, 0.0])
    np.testing.assert_allclose(second, [-1.5, 0.5])
