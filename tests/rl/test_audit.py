"""The audit measures calls under the weights that sampled them, and only those."""

import jax
import numpy as np
import pytest
from small_policy import MODEL, make_turn

from forge_jax.config import OptimConfig, PackConfig
from forge_jax.models.layout import init
from forge_jax.rl.audit import Audit, only_version, recomputed
from forge_jax.rl.credit import turn_sample
from forge_jax.rl.state import create
from forge_jax.rl.step import StepConfig, update
from forge_jax.sched.pack import micro_batches
from forge_jax.types import Turn

STEP = StepConfig(model=MODEL, optim=OptimConfig(learning_rate=0.05), tile=16)
PACK = PackConfig(budget=256, tile=16, bucket_ratio=2.0)


def turn(seed: int, versions: list[int]) -> Turn:
    prompt, output = np.split(
        np.random.default_rng(seed).integers(0, MODEL.vocab, 5 + len(versions)), [5]
    )
    return make_turn(prompt, output, versions)


def sampled_by(params: object, plain: Turn) -> Turn:
    """The same call with the log-probs that `params` give it."""
    sample = turn_sample(plain, 1.0)
    logp = recomputed(params, micro_batches([sample], "tree", PACK), len(sample.tokens), STEP)
    fields = {**vars(plain), "logprobs": logp[sample.mask]}
    return Turn(**fields)


def test_a_call_that_an_update_crossed_has_no_version() -> None:
    assert only_version(turn(0, [3, 3])) == 3
    assert only_version(turn(0, [2, 3])) is None


@pytest.mark.parametrize("keep", [0, 2])
def test_calls_are_checked_under_the_weights_that_sampled_them(keep: int) -> None:
    audit = Audit(keep)
    state = create(init(MODEL, jax.random.key(0)), STEP.optim)
    audit.remember(0, state.params)
    old = sampled_by(state.params, turn(1, [0, 0, 0]))
    crossed = turn(2, [0, 1, 1])  # its log-probs are wrong, and nobody looks
    turns = [old, crossed]
    samples = [turn_sample(t, 1.0) for t in turns]
    trees = micro_batches(samples, "tree", PACK)
    for step in (1, 2):
        state, done = update(state, trees, STEP)
        found = audit.gap(samples, turns, trees, step - 1, done, STEP)
        audit.remember(step, state.params)
        if step == 1 or keep:
            assert found["logp_gap_version"] == 0
            assert found["logp_gap_calls"] == 1
            assert found["logp_gap_max"] < 1e-5
        else:
            assert found["logp_gap_max"] is None


def test_a_wrong_log_prob_shows() -> None:
    audit = Audit(1)
    state = create(init(MODEL, jax.random.key(0)), STEP.optim)
    good = sampled_by(state.params, turn(1, [0, 0, 0]))
    bad = Turn(**{**vars(good), "logprobs": good.logprobs + np.float32([0, 0, 0.25])})
    samples = [turn_sample(t, 1.0) for t in (good, bad)]
    trees = micro_batches(samples, "tree", PACK)
    state, done = update(state, trees, STEP)
    found = audit.gap(samples, [good, bad], trees, 0, done, STEP)
    assert found["logp_gap_max"] == pytest.approx(0.25, abs=1e-4)


def test_only_the_newest_are_kept() -> None:
    audit = Audit(2)
    params = init(MODEL, jax.random.key(0))
    for version in range(5):
        audit.remember(version, params)
    assert sorted(audit._past) == [3, 4]
