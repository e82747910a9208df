"""Costs follow what was measured, are never negative, and count what attention visits."""

from dataclasses import astuple

import numpy as np
import pytest
from synthetic import accidents, agentic

from forge_jax.sched.cost import CostModel, Fit, analytic, sizes_of
from forge_jax.sched.merge import merge
from forge_jax.sched.pack import attention_area

SIZES = (6, 256, 8, 4, 64, 768, 8192)
NAMES = ("layers", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab")
MODEL = dict(zip(NAMES, SIZES, strict=True))
TRUTH = CostModel(launch=0.02, token=3e-5, area=2e-9, edge=1e-4, tile=3e-6)


def random_sizes(rng: np.random.Generator) -> np.ndarray:
    tokens = rng.integers(500, 20_000)
    area = tokens * rng.integers(100, 3000)
    parts = rng.integers(1, 9)
    return np.array([parts, tokens, area, tokens * rng.uniform(0.1, 0.6), area / 4096 + tokens])


def test_the_prior_counts_operations() -> None:
    weights = 6 * (256 * 64 * (2 * 8 + 2 * 4) + 3 * 256 * 768)
    model = analytic(**MODEL, flops=1.0)
    assert model.token == 6 * weights
    assert model.area == 14 * 6 * 8 * 64
    assert model.edge == 8 * 256 * 8192
    sizes = np.array([2, 10, 100, 3, 7])
    assert model.seconds(sizes) == 10 * model.token + 100 * model.area + 3 * model.edge
    assert Fit(model).model() == model


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_finds_the_costs_behind_the_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fit = Fit(analytic(**MODEL))
    for _ in range(100):
        sizes = random_sizes(rng)
        fit.observe(sizes, float(TRUTH.seconds(sizes)) * rng.uniform(0.95, 1.05))
    model = fit.model()
    for _ in range(20):
        sizes = random_sizes(rng)
        assert model.seconds(sizes) == pytest.approx(TRUTH.seconds(sizes), rel=0.05)
    assert min(astuple(model)) >= 0


def test_one_measurement_sets_the_pace_and_keeps_the_shares() -> None:
    prior = analytic(**MODEL)
    fit = Fit(prior)
    sizes = random_sizes(np.random.default_rng(0))
    fit.observe(sizes, 7 * float(prior.seconds(sizes)))
    assert fit.model().seconds(sizes) == pytest.approx(7 * prior.seconds(sizes), rel=0.01)
    other = sizes * [1, 2, 5, 1, 2]
    assert fit.model().seconds(other) == pytest.approx(7 * prior.seconds(other), rel=0.1)


def test_compilations_do_not_count() -> None:
    rng = np.random.default_rng(0)
    fit = Fit(analytic(**MODEL))
    for i in range(40):
        sizes = random_sizes(rng)
        fit.observe(sizes, float(TRUTH.seconds(sizes)) * (100 if i % 7 == 0 else 1))
    sizes = random_sizes(rng)
    assert fit.model().seconds(sizes) == pytest.approx(TRUTH.seconds(sizes), rel=0.05)
    with pytest.raises(ValueError, match="seconds=0"):
        fit.observe(sizes, 0.0)


@pytest.mark.parametrize("tile", [4, 16, 64])
def test_sizes_are_what_attention_visits(tile: int) -> None:
    for tree in (merge(accidents(0, 4)), merge(agentic(0, 50)), merge(agentic(0, 50), "none")):
        n = tree.n_tokens
        index = np.arange(-(-n // tile) * tile)
        exit_ = np.zeros(len(index), np.int64)
        exit_[:n] = tree.exit
        sees = (index[None, :] <= index[:, None]) & (index[:, None] < exit_[None, :])
        live = sees.reshape(-1, tile, len(index) // tile, tile).any((1, 3)).sum()
        wanted = [1, n, attention_area(tree), tree.n_edges, live]
        assert sizes_of(tree, tile).tolist() == wanted
