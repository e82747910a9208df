"""On a task where every group can be counted, estimates have the means that are said of them."""

import math

import numpy as np
import pytest

from experiments import bias, stopping_toy
from experiments.bias import BiasConfig, Group, measure, without_constant
from forge_jax.loading import UserError, load
from forge_jax.rl.credit import credited
from forge_jax.rl.rewards import ALL, OUTCOME, part, seen_returns

CFG = BiasConfig(group=3, policies=3, spread=1.0, process=0.1, speed=0.3, gamma=0.9, seed=0,
                 plot=None)  # fmt: skip


def test_the_paths_of_the_toy_are_all_there_are() -> None:
    paths = stopping_toy.paths()
    chances, scores = stopping_toy.policy(np.linspace(-1, 1, stopping_toy.LOGITS), paths)
    assert chances.sum() == pytest.approx(1.0, abs=1e-14)
    np.testing.assert_allclose(chances @ scores.sum(axis=1), 0.0, atol=1e-14)  # E[score] = 0
    members, orders = stopping_toy.groups(len(paths), 3)
    assert np.exp(orders).sum() == pytest.approx(len(paths) ** 3)
    assert len(members) == math.comb(len(paths) + 2, 3)


def test_means_are_exact_where_that_is_claimed_and_nowhere_else() -> None:
    rows = {(row["reward"], row["estimator"]): row for row in measure(CFG)["rows"]}
    out = "to go, leave-one-out, equal groups out"
    harmless = rows.pop(("outcome", out))  # without process rewards such groups have nothing
    assert harmless["bias_max"] < 1e-12
    for row in rows.values():
        assert (row["bias_max"] < 1e-12) == row["claimed"], row
    shrunk = rows["outcome", "to go, group mean (Dr. GRPO)"]
    assert shrunk["bias"] == pytest.approx(1 / 3)
    assert shrunk["cosine"] == pytest.approx(1.0)
    assert rows["outcome", "rewards centred by turn"]["bias"] > 0.5


def test_what_is_measured_is_what_training_credits_with() -> None:
    rng = np.random.default_rng(0)
    every = [stopping_toy.episode(path) for path in stopping_toy.paths()]
    for _ in range(50):
        episodes = [every[m] for m in rng.integers(len(every), size=4)]
        parts = [part(episode, ALL, OUTCOME) for episode in episodes]
        seen = seen_returns(episodes, parts, OUTCOME.reward.weights("stop"))
        want = without_constant(Group(episodes=episodes, parts=parts, seen=seen))
        for got, values in zip(credited([episodes])[0], want, strict=True):
            assert np.nan_to_num(got).tolist() == values[: len(got)].tolist()


@pytest.mark.parametrize(
    "mapping", [{"group": 1}, {"seed": -1}, {"group": 6}, {"gamma": 1.0}, {"speed": 0.0}]
)
def test_what_cannot_be_measured_is_refused(mapping: dict[str, float]) -> None:
    [name] = mapping
    with pytest.raises(UserError, match=name):
        load(BiasConfig, vars(CFG) | mapping)


def test_the_table_has_every_row() -> None:
    one = measure(BiasConfig(**vars(CFG) | {"group": 2, "policies": 1}))["rows"]
    assert sum(line.count("%") > 1 for line in bias.table(one).splitlines()) >= len(one)
