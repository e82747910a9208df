"""A step beyond a limit leaves the state as it is, to the bit; what is not finite never gets in."""

import dataclasses
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, make_turn, packed, parameters
from synthetic import agentic

from forge_jax.config import OptimConfig, ProtectConfig, Skip, UserError, load
from forge_jax.rl import step
from forge_jax.rl.audit import Audit
from forge_jax.rl.costs import prior
from forge_jax.rl.credit import turn_sample
from forge_jax.rl.guard import FEWEST_NORMS, Guard, cosine, judged
from forge_jax.rl.loop import Prepared, train_step
from forge_jax.rl.state import TrainState, create
from forge_jax.rl.step import Gathered, StepConfig, Updated
from forge_jax.rl.updates import Minibatch
from forge_jax.sched.cost import Fit

CFG = StepConfig(model=MODEL, optim=OptimConfig(learning_rate=0.1), attention="reference")
SAMPLES = agentic(0, MODEL.vocab)
DONE = Updated(
    stepped=True, loss=0.0, grad_norm=1.0, metrics={}, logp=np.zeros(1), index=np.zeros(1, int),
    seconds=0.0,
)  # fmt: skip


def updated(guard: Guard, samples: Any = SAMPLES) -> tuple[bool, Updated, TrainState]:
    """Whether an update left every bit as it was, what it came to, and the state after it."""
    state = create(parameters(), CFG.optim)
    before = jax.device_get(state)
    judge = guard.judge(samples)
    state, done = step.update(state, packed(samples, "tree"), CFG, judge=judge)
    pairs = zip(*map(jax.tree.leaves, (before, jax.device_get(state))), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs), done, state


def test_a_step_within_all_limits_is_the_step_without_them() -> None:
    wide = ProtectConfig(least_ess=1e-6, most_kl=1e6, norm_spike=1e6, cosine=0.9)
    states = []
    for cfg in (ProtectConfig(), wide):
        same, done, state = updated(Guard(cfg))
        assert not same
        assert (done.stepped, done.skipped) == (True, None)
        states.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("limit", "why"),
    [({"least_ess": 0.999}, Skip.ESS), ({"most_kl": 1e-9}, Skip.KL)],
)
def test_a_skipped_step_changes_no_bit(limit: dict[str, float], why: Skip) -> None:
    same, done, _ = updated(Guard(ProtectConfig(**limit)))
    assert same
    assert (done.stepped, done.skipped) == (False, why)
    assert len(done.logp)


@pytest.mark.parametrize("field", ["old_logp", "advantage"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_never_reaches_the_weights(field: str, value: float) -> None:
    spoilt = getattr(SAMPLES[1], field).copy()
    spoilt[np.flatnonzero(SAMPLES[1].mask)[0]] = value * (-1 if field == "old_logp" else 1)
    samples = [SAMPLES[0], dataclasses.replace(SAMPLES[1], **{field: spoilt}), *SAMPLES[2:]]
    same, done, _ = updated(Guard(ProtectConfig()), samples)
    assert same
    assert done.skipped is Skip.NON_FINITE


def test_a_row_tells_what_was_skipped_and_that_nothing_was_trained() -> None:
    turns = tuple(make_turn([1, 2], [3 + i, 4, 5], [0, 0, 1]) for i in range(4))
    samples = tuple(turn_sample(turn, 1.0 - (i % 2)) for i, turn in enumerate(turns))
    trees = tuple(packed(samples, "tree"))
    whole = Minibatch(samples=len(samples), parts=tuple(trees))
    batch = Prepared(samples=samples, turns=turns, left_out={}, minibatches=(whole,))
    for limit, why in ((None, None), (0.999, Skip.ESS)):
        guard = Guard(ProtectConfig(least_ess=limit))
        state, fit = create(parameters(), CFG.optim), Fit(prior(MODEL))
        state, row = train_step(state, batch, 3, 1, CFG, Audit(0), fit, guard, None, None)
        assert int(state.step) == (0 if why else 1)
        assert (row["stepped"], row["skipped"]) == (why is None, why)
        assert row["tokens_skipped"] == (12 if why else 0)
        assert row["tokens_trained"] == (0 if why else 12)
        assert row["age_share"] == pytest.approx({"1": 1 / 3, "2": 2 / 3})
        assert 1 / 12 <= row["ess_token"] < 0.999
        assert row["ratio_p50"] <= row["ratio_max"]


def test_a_spike_is_one_against_the_steps_before() -> None:
    guard, found = (
        Guard(ProtectConfig(norm_spike=3.0)),
        step.gather(parameters(), packed(SAMPLES, "tree"), CFG),
    )
    judge = guard.judge(SAMPLES)
    for _ in range(FEWEST_NORMS):
        assert judge(found, 1e9) is None
        guard.row(DONE)
    assert judge(found, 2.9) is None
    assert judge(found, 3.1) is Skip.GRAD_NORM


def test_the_run_ends_at_so_many_in_a_row_also_after_a_resume() -> None:
    skipped = dataclasses.replace(DONE, stepped=False, skipped=Skip.ESS)
    idle = dataclasses.replace(DONE, stepped=False)  # nothing to train on
    cfg, rows = ProtectConfig(most_skipped=3), []
    guard = Guard(cfg)
    for done in (skipped, skipped, DONE, skipped, idle, skipped):
        rows.append({"stepped": done.stepped} | guard.row(done))
        guard.check()
    for last in (guard, Guard(cfg, rows)):
        last.row(skipped)
        with pytest.raises(UserError, match=r"protect\.most_skipped=3 .* because of ess"):
            last.check()


def test_each_update_of_a_batch_counts_also_after_a_resume() -> None:
    batches, cfg = FEWEST_NORMS // 2, ProtectConfig(norm_spike=3.0, most_skipped=2)
    skipped = dataclasses.replace(DONE, stepped=False, skipped=Skip.KL, grad_norm=float("nan"))
    found = Gathered(
        grads={}, loss=0.0, metrics=cast(Any, None), logp=np.zeros(1), index=np.zeros(1, int),
        seconds=0.0,
    )  # fmt: skip
    rows, guard = [], Guard(cfg)
    for _ in range(batches):
        done = [DONE, dataclasses.replace(DONE, grad_norm=3.0)]
        for one in done:
            guard.row(one)
        guard.check()
        rows.append({"stepped": True, "skipped": None, "grad_norm": 2.0} | judged(done))
    for one in (guard, Guard(cfg, json.loads(json.dumps(rows)))):  # the median is 2, of all
        assert [one.judge(SAMPLES)(found, norm) for norm in (5.9, 6.1)] == [None, Skip.GRAD_NORM]
    partly = {"stepped": True, "skipped": Skip.KL} | judged([DONE, skipped, skipped, skipped])
    Guard(cfg, [*rows, partly, partly]).check()  # batches that went beyond a limit on their way
    wholly = {"stepped": False, "skipped": Skip.KL} | judged([skipped, skipped, skipped])
    Guard(cfg, [*rows, wholly, partly, wholly]).check()
    with pytest.raises(UserError, match="most_skipped=2 batches"):
        Guard(cfg, [*rows, wholly, wholly]).check()
    for one in [skipped] * 3:
        guard.row(one)
    guard.check()  # one batch
    guard.row(skipped)
    with pytest.raises(UserError, match="most_skipped=2 batches"):
        guard.check()
    assert judged([DONE]) == {}


def test_the_cosine_is_of_one_gradient_and_the_next(caplog: pytest.LogCaptureFixture) -> None:
    one, other = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}, {
        "a": jnp.array([0.0, 1.0]), "b": jnp.array([0.0])
    }  # fmt: skip
    assert cosine(one, one) == pytest.approx(1)
    assert cosine(one, jax.tree.map(lambda x: -2 * x, one)) == pytest.approx(-1)
    assert cosine(one, other) == 0
    guard = Guard(ProtectConfig(cosine=0.5))
    found = step.gather(parameters(), packed(SAMPLES, "tree"), CFG)
    rows = []
    for _ in range(2):
        guard.judge(SAMPLES)(found, 1.0)
        rows.append(guard.row(DONE))
    assert "grad_cosine" not in rows[0]
    assert rows[1]["grad_cosine"] == pytest.approx(1, abs=1e-5)
    assert "above protect.cosine=0.5" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [("least_ess", 0.0), ("least_ess", 1.0), ("most_kl", 0.0), ("norm_spike", 1.0),
     ("cosine", 1.0), ("most_skipped", 0)],
)  # fmt: skip
def test_a_limit_that_says_nothing_is_refused(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"protect: {key}={value}"):
        load(ProtectConfig, {key: value}, "protect.")
