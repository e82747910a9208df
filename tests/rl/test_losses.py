"""The policy loss of one occurrence, against formulas by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.rl.losses import Metrics, cispo, measure, negative_log_likelihood

CAP = 5.0


def slopes(logp: np.ndarray, old: np.ndarray, advantage: np.ndarray) -> jax.Array:
    return jax.grad(lambda x: jnp.sum(cispo(x, old, advantage, CAP)))(jnp.asarray(logp))


@pytest.mark.parametrize("seed", range(3))
def test_cispo_weighs_the_policy_gradient_by_the_capped_ratio(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, old = rng.normal(-3, 2, (2, 64)).astype(np.float32)
    advantage = rng.normal(0, 1, 64).astype(np.float32)
    ratio = np.minimum(np.exp(logp - old), CAP)
    assert (ratio == CAP).any()
    assert (ratio < 1).any()
    np.testing.assert_allclose(
        cispo(logp, old, advantage, CAP), -ratio * advantage * logp, rtol=1e-5
    )
    np.testing.assert_allclose(slopes(logp, old, advantage), -ratio * advantage, rtol=1e-5)


def test_a_clipped_token_keeps_the_gradient_of_the_cap() -> None:
    logp, old = np.float32([-1.0, -1.0]), np.float32([-9.0, -9.0])
    advantage = np.float32([2.0, -3.0])
    assert slopes(logp, old, advantage).tolist() == [-CAP * 2, CAP * 3]


def test_there_is_no_floor() -> None:
    logp, old = np.float32([-20.0]), np.float32([-1.0])
    np.testing.assert_allclose(slopes(logp, old, np.float32([1.0])), -np.exp(-19.0), rtol=1e-5)


def test_an_overflowing_ratio_is_the_cap() -> None:
    logp, old = np.float32([-1.0]), np.float32([-1000.0])
    assert slopes(logp, old, np.float32([1.0])).tolist() == [-CAP]


def test_likelihood_looks_at_nothing_else() -> None:
    logp = np.float32([-1.0, -2.0])
    nan = np.float32([np.nan, np.nan])
    assert negative_log_likelihood(logp, nan, nan, CAP).tolist() == [1.0, 2.0]


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    logp, old, entropy = rng.normal(-2, 1.5, (3, 40)).astype(np.float32)
    weight = np.float32(rng.random(40) < 0.8)
    logp[weight == 0] = 50.0  # what stands at padding must not matter, however large

    def of(part: slice) -> Metrics:
        return measure(logp[part], old[part], entropy[part], weight[part], CAP)

    whole = of(slice(0, 40)).values()
    parts = (of(slice(0, 13)) + of(slice(13, 40))).values()
    assert parts == pytest.approx(whole, rel=1e-5)
    real = weight > 0
    delta = (logp - old)[real].astype(np.float64)
    assert whole["ratio_mean"] == pytest.approx(np.exp(delta).mean(), rel=1e-5)
    assert whole["clip_share"] == pytest.approx((np.exp(delta) > CAP).mean(), rel=1e-5)
    assert whole["kl"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-5)
