"""The learning rate climbs, falls in a straight line, and stays."""

import jax.numpy as jnp
import numpy as np

from forge_jax.config import OptimConfig
from forge_jax.rl.state import rate


def rates(cfg: OptimConfig, steps: int) -> np.ndarray:
    return np.array([float(rate(jnp.asarray(s), cfg)) for s in range(steps)])


def test_warm_up_and_decay() -> None:
    cfg = OptimConfig(learning_rate=0.4, warmup_steps=4, decay_steps=12, final_share=0.25)
    got = rates(cfg, 16)
    np.testing.assert_allclose(got[:4], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(np.diff(got[4:13]), -0.3 / 8, rtol=1e-5)
    np.testing.assert_allclose(got[12:], 0.1, rtol=1e-6)


def test_without_decay_the_rate_stays() -> None:
    np.testing.assert_allclose(rates(OptimConfig(learning_rate=0.4), 9), 0.4, rtol=1e-6)


def test_a_run_shorter_than_its_warm_up_has_a_rate() -> None:
    got = rates(OptimConfig(learning_rate=0.4, warmup_steps=20, decay_steps=5), 8)
    assert (got > 0).all()
