"""Several updates of one batch: what each is of, and what they compare with."""

from typing import Any

import jax
import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import agentic

from forge_jax.config import LossConfig, SchedConfig, Skip
from forge_jax.rl.losses import clip
from forge_jax.rl.parallel import gather, logprobs
from forge_jax.rl.step import StepConfig, Updated
from forge_jax.rl.updates import compared, dealt, laid, together, token_counts


@pytest.mark.parametrize("updates", [2, 3, 5])
def test_groups_that_train_something_are_dealt_whole_and_evenly(updates: int) -> None:
    groups = [3, 0, 1, 4, 0, 2, 5, 1]
    deals = dealt(groups, updates, (7, 40))
    assert sorted(place for deal in deals for place in deal) == [0, 2, 3, 5, 6, 7]
    sizes = [len(deal) for deal in deals]
    assert max(sizes) - min(sizes) <= 1
    assert deals == dealt(groups, updates, (7, 40))
    assert any(deals != dealt(groups, updates, (7, item)) for item in range(41, 50))
    assert dealt(groups, 1, (7, 40)) == [list(range(8))]


def test_places_count_over_the_whole_batch() -> None:
    samples = agentic(0, MODEL.vocab)
    made = laid([samples[:4], samples[4:]], lambda own: packed(own, "tree"))
    assert [one.samples for one in made] == [4, len(samples) - 4]
    mask = np.concatenate([s.mask for s in samples])
    owner = np.repeat(np.arange(len(samples)), [len(s.tokens) for s in samples])
    tokens = np.concatenate([s.tokens for s in samples])
    found = []
    for one in made:
        for tree in one.parts:
            real = tree.occurrence_index >= 0
            index, edge = tree.occurrence_index[real], tree.occurrence_edge[real]
            assert np.array_equal(tree.occurrence_sample[real], owner[index])
            assert np.array_equal(tree.tokens[tree.edge_token[edge]], tokens[index])
            found += index.tolist()
    assert sorted(found) == np.flatnonzero(mask).tolist()


def test_the_anchor_is_the_policy_before_the_first_update() -> None:
    samples = agentic(0, MODEL.vocab)
    objective = LossConfig(kind="clip", anchor="trainer", eps_low=0.01, eps_high=0.01)
    cfg = StepConfig(model=MODEL, loss=clip, objective=objective, attention="reference")
    made = laid([samples[:4], samples[4:]], lambda own: packed(own, "tree"))
    before = parameters()
    after = jax.tree.map(lambda x: x * 1.02, before)
    first, *_, last = compared(made, before, 2, cfg)
    alone, whole = (gather(before, x.parts, cfg) for x in (made[0], first))
    assert whole.loss == pytest.approx(alone.loss, rel=1e-5)  # r = 1, whoever computed it
    assert whole.metrics.values()["clip_share"] == 0
    moved = gather(after, last.parts, cfg)
    anchor = np.zeros(sum(len(s.tokens) for s in samples))
    for index, logp in logprobs(before, last.parts, cfg):
        anchor[index[index >= 0]] = np.asarray(logp)[index >= 0]
    ratio = np.exp(moved.logp - anchor[moved.index])
    a = np.concatenate([s.advantage for s in samples])[moved.index]
    out = ((a > 0) & (ratio > 1.01)) | ((a < 0) & (ratio < 0.99))
    wanted = -np.minimum(ratio * a, np.clip(ratio, 0.99, 1.01) * a).mean()
    assert moved.loss == pytest.approx(wanted, rel=1e-4)
    assert moved.metrics.values()["clip_share"] == pytest.approx(out.mean())
    assert 0 < out.mean() < 1
    sampler = StepConfig(model=MODEL)
    assert compared(made, before, 2, sampler) == [*made, *made]  # nothing is computed


def test_updates_are_of_whole_groups() -> None:
    with pytest.raises(ValueError, match="updates=9 must be from 1 to batch=8"):
        SchedConfig(updates=9)
    with pytest.raises(ValueError, match="epochs=0"):
        SchedConfig(epochs=0)


def of_place(place: int, **others: Any) -> Updated:
    """An update of one token."""
    told: dict[str, Any] = {"stepped": True, "loss": 1.0, "grad_norm": 2.0, "metrics": {"kl": 0.5}}
    logp, index = np.full(1, -1.0, np.float32), np.full(1, place)
    return Updated(**told | {"logp": logp, "index": index, "seconds": 0.0} | others)


def test_what_is_not_finite_is_in_no_mean_and_each_token_counts_for_what_became_of_it() -> None:
    spoilt = {"stepped": False, "skipped": Skip.NON_FINITE, "loss": np.nan, "grad_norm": np.nan}
    done = [of_place(0), of_place(1, **spoilt, metrics={"kl": np.nan}), of_place(2)]
    found = together(done, 3)
    assert (found.stepped, found.skipped) == (True, Skip.NON_FINITE)
    assert (found.loss, found.grad_norm, found.metrics) == (1.0, 2.0, {"kl": 0.5})
    assert found.index.tolist() == [0, 2]
    assert token_counts(done, 3) == {"tokens_trained": 2, "tokens_skipped": 1}
    late = [of_place(0, stepped=False, skipped=Skip.ESS), of_place(0)]  # the second pass took it
    assert token_counts(late, 1) == {"tokens_trained": 1, "tokens_skipped": 0}
