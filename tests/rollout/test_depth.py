"""The depth with most tokens a second is found, and left when it is not any more."""

import numpy as np
import pytest

from forge_jax.rollout.depth import PROBE, RAREST, DepthController

DEPTHS = (0, 1, 2, 4)


def simulate(
    controller: DepthController,
    share: float,
    cost: float,
    calls: int,
    rows: int = 8,
    followed: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Depths of `calls` calls where each draft is accepted with probability `share` and a verify
    takes 1 + cost * depth, with noise."""
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(calls):
        depth = controller.choose(rows, followed)
        chosen.append(depth)
        tried, accepted = [0] * DEPTHS[-1], [0] * DEPTHS[-1]
        for _ in range(rows):
            for i in range(depth):
                tried[i] += 1
                if rng.uniform() >= share:
                    break
                accepted[i] += 1
        controller.observe(tried, accepted)
        controller.time(rows, depth, (1 + cost * depth) * rng.uniform(0.95, 1.3))
    return chosen


def rate(depth: int, share: float, cost: float) -> float:
    """Tokens a second."""
    return sum(share**i for i in range(depth + 1)) / (1 + cost * depth)


@pytest.mark.parametrize(
    ("share", "cost"), [(0.9, 0.1), (0.7, 0.1), (0.5, 0.3), (0.05, 0.2), (0.95, 1.2)]
)
def test_the_best_depth_is_chosen(share: float, cost: float) -> None:
    controller = DepthController(DEPTHS)
    chosen = simulate(controller, share, cost, 400)
    late = [rate(depth, share, cost) for depth in chosen[200:]]
    best = max(rate(depth, share, cost) for depth in DEPTHS)
    assert np.median(late) > 0.92 * best  # as well as the noise of the timings lets see
    assert np.mean(late) > 0.9 * best
    if rate(4, share, cost) < 0.9 * best:
        assert 4 not in chosen[-50:] or chosen[-50:].count(4) <= 2


def test_each_number_of_rows_has_a_depth_of_its_own() -> None:
    controller = DepthController(DEPTHS)
    few = simulate(controller, 0.7, 0.02, 300, rows=4)
    many = simulate(controller, 0.7, 1.1, 300, rows=64)
    assert few[-1] == 4
    assert many[-1] == 0
    gains = controller.speedups()
    assert gains[4] > 2
    assert gains[64] == 1


@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_a_bad_drafter_is_asked_ever_less(cost: float) -> None:
    controller = DepthController(DEPTHS)
    chosen = np.array(simulate(controller, 0.0, cost, 4000))
    asked = np.flatnonzero(chosen)
    assert len(asked) < 0.03 * len(chosen)
    assert np.diff(asked).max() >= RAREST - PROBE


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_is_disturbed_makes_no_bad_drafter_look_good(seed: int) -> None:
    """Calls that get longer with their sequences, and ten times as long while others work."""
    rng = np.random.default_rng(seed)
    controller, chosen = DepthController(DEPTHS), []
    for call in range(2000):
        depth = controller.choose(1)
        chosen.append(depth)
        tried = [4] * min(depth, 1) + [0] * (DEPTHS[-1] - min(depth, 1))
        controller.observe(tried, [0] * DEPTHS[-1])
        busy = 10 if call // 50 % 2 == 0 or rng.uniform() < 0.2 else 1
        controller.time(1, depth, (1 + 0.1 * depth) * (1 + call % 64 / 16) * busy)
    assert np.count_nonzero(chosen[100:]) < 0.02 * 1900


def test_a_drafter_that_learns_is_found_again() -> None:
    controller = DepthController(DEPTHS)
    simulate(controller, 0.0, 0.1, 200)
    assert controller.choose(8) == 0
    late = simulate(controller, 0.9, 0.1, 6 * RAREST, seed=1)[-100:]
    assert late.count(4) > 90


def test_a_drafter_that_is_not_ready_is_not_tried() -> None:
    controller = DepthController(DEPTHS)
    assert set(simulate(controller, 0.9, 0.1, 200, followed=0.0)) == {0}
    assert controller.speedups() == {8: 1.0}
    assert simulate(controller, 0.9, 0.1, 200)[-1] == 4
    assert controller.choose(8, followed=0.05) == 0  # guesses for most of them are in vain


def test_only_calls_side_by_side_are_compared() -> None:
    """What comes between, be it timed or not, may have changed all else."""
    controller = DepthController(DEPTHS)
    for _ in range(8):
        controller.time(8, 0, 1.0)
        controller.apart()
        controller.time(8, 2, 5.0)
        controller.time(4, 0, 1.0)
    assert controller.cost(8, 2) is None
    for _ in range(4):
        controller.time(8, 0, 1.0)
        controller.time(8, 2, 1.5)
        controller.apart()
    assert controller.cost(8, 2) == 1.5


def test_expected_tokens_are_those_of_the_formula() -> None:
    controller = DepthController(DEPTHS)
    for _ in range(400):
        controller.observe([100, 60, 36, 22], [60, 36, 22, 13])
    assert controller.expected(4) == pytest.approx((1 - 0.6**5) / (1 - 0.6), rel=0.02)


def test_depths_begin_with_none() -> None:
    with pytest.raises(ValueError, match=r"depths=\(1, 2\) must begin with 0"):
        DepthController((1, 2))
