"""The policy that a run is held near is that of its start, and holds it there."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.config import LossConfig, SchedConfig, TrainConfig, UserError
from forge_jax.rl.forward import Batch, StepConfig
from forge_jax.rl.losses import reinforce
from forge_jax.rl.reference import remembered
from forge_jax.rl.terms import share_of_loss

WORDS = 6
DRAWS = 256  # from the policy, for an update
START = np.float32([0.5, -0.3, 0.1, 0.0, -0.6, 0.4])  # logits
WORTH = np.float32([0, 0, 0, 0, 1, 0])


def test_what_is_remembered_is_the_start_to_the_bit_whatever_is_trained_since(
    tmp_path: Path,
) -> None:
    def drawn(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return {"a": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "b": {"c": jnp.ones(2)}}

    start = drawn(0)
    wanted = jax.device_get(start)
    with pytest.raises(UserError, match="began without it"):
        remembered(start, tmp_path, fresh=False)
    remembered(drawn(2), tmp_path, fresh=True)  # a start that came to nothing
    found = remembered(start, tmp_path, fresh=True)
    jax.tree.map(lambda x: x.delete(), start)  # as an update does
    for again in (found, remembered(drawn(1), tmp_path, fresh=False)):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), wanted)


def trained(objective: LossConfig) -> tuple[np.ndarray, list[float]]:
    """Probabilities of a policy over words after updates that pay for one, and its divergence
    from its start in each."""
    cfg = StepConfig(model=None, loss=reinforce, objective=objective)  # type: ignore[arg-type]
    rng, logits, told = np.random.default_rng(0), jnp.asarray(START), []
    worth = jnp.asarray(WORTH)

    @jax.jit
    def step(logits: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(logits: jax.Array) -> Any:
            logp = jax.nn.log_softmax(logits)[word]
            given = dict.fromkeys(Batch.__dataclass_fields__) | {
                "old_logp": jax.lax.stop_gradient(logp),
                "advantage": worth[word] - jnp.mean(worth[word]),
                "weight": jnp.ones(DRAWS),
                "others": {"reference": jax.nn.log_softmax(START)[word]},
            }
            share, (metrics, _, _) = share_of_loss(logp, logp, Batch(**given), float(DRAWS), cfg)
            return share, metrics.beside["kl_reference"].total / DRAWS

        slope, apart = jax.grad(loss, has_aux=True)(logits)
        return logits - 0.5 * slope, apart

    for _ in range(100):
        p = np.asarray(jax.nn.softmax(logits), np.float64)
        logits, apart = step(logits, jnp.asarray(rng.choice(WORDS, DRAWS, p=p / p.sum())))
        told.append(float(apart))
    return np.asarray(jax.nn.softmax(logits)), told


def test_a_large_coefficient_keeps_the_policy_near_its_start() -> None:
    start = np.exp(START) / np.exp(START).sum()
    free, apart = trained(LossConfig(kind="reinforce", kl=1e-3, reference="start"))
    assert apart[0] == 0
    assert free[4] > 0.9
    assert apart[-1] > 1
    held, near = trained(LossConfig(kind="reinforce", kl=3.0, reference="start"))
    assert start[4] < held[4] < 2 * start[4]
    assert max(near) < 0.1
    # Where the pay, p (worth - mean), is what KL(start, p) pulls back, kl (p - start).
    np.testing.assert_allclose(held * (WORTH - held[4]), 3.0 * (held - start), atol=0.03)


def test_a_reference_leaves_something_between_where_the_anchor_does_not() -> None:
    near = {"kind": "tis", "kl": 0.1}
    one = SchedConfig()
    with pytest.raises(ValueError, match=r"loss\.reference=start"):
        TrainConfig(model="quick", task="hop", steps=1, sched=one, loss=LossConfig(**near))
    TrainConfig(
        model="quick", task="hop", steps=1, sched=one, loss=LossConfig(**near, reference="start")
    )
