"""The benchmark of experts: its baselines compute the same, and it prints what it promises."""

import jax
import numpy as np
import pytest

from experiments.bench_experts import ExpertsConfig, arrays, everywhere, one_expert, routes, run
from forge_jax.config import UserError, load
from forge_jax.models.experts import Experts, mixture

SMALL = {"tokens": 40, "experts": 4, "per_token": 2, "embed": 8, "ffn": 12, "steps": 1}


def config(**overrides: object) -> ExpertsConfig:
    return load(ExpertsConfig, SMALL | overrides)


def test_it_prints_every_rate_and_the_ratios() -> None:
    printed = run(config())
    assert printed["rows"] == 80
    assert set(printed["rates"]) == {"all", "one", "ragged", "blocks"}
    for rate in printed["rates"].values():
        assert all(value > 0 for value in rate.values())
    assert all(printed[f"blocks_vs_{name}"] > 0 for name in ("all", "one", "ragged"))


def test_baselines_compute_what_they_stand_for() -> None:
    cfg, rng = config(), np.random.default_rng(0)
    x, chosen, weight, layer, _ = arrays(cfg, routes(cfg, rng), rng)
    got = jax.jit(mixture)(x, chosen, weight, layer)
    np.testing.assert_allclose(everywhere(x, chosen, weight, layer), got, rtol=1e-4, atol=1e-5)
    alike = Experts(*(w.at[:].set(w[:1]) for w in layer))
    got = jax.jit(mixture)(x, chosen, weight, alike)
    np.testing.assert_allclose(one_expert(x, chosen, weight, alike), got, rtol=1e-4, atol=1e-5)


def test_skew_makes_some_experts_popular() -> None:
    rng = np.random.default_rng(0)
    counts = np.bincount(routes(config(tokens=4000, skew=2.0), rng).reshape(-1), minlength=4)
    assert counts[0] > 2 * counts[3]
    assert all(len(set(row)) == 2 for row in routes(config(skew=2.0), rng))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"per_token": 5}, "per_token=5"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
    ],
)
def test_mistakes_are_named(change: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(**change)
