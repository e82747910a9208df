"""What a step is packed by follows a clock only where nothing has to repeat."""

import jax
import numpy as np
import pytest
from small_policy import MODEL

from forge_jax.rl.costs import prior, trusted
from forge_jax.sched.cost import Fit


def test_a_clock_is_trusted_only_by_one_host_that_need_not_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fit(prior(MODEL))
    fit.observe(np.array([1.0, 100.0, 5000.0, 50.0, 30.0]), 2.0)
    assert fit.model() != prior(MODEL)
    assert trusted(fit, MODEL, repeats=False) == fit.model()
    assert trusted(fit, MODEL, repeats=True) == prior(MODEL)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert trusted(fit, MODEL, repeats=False) == prior(MODEL)
