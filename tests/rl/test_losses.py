"""The policy losses of single occurrences, against formulas by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.objective import KINDS, LossConfig, check_cap
from forge_jax.rl.losses import (
    LOSSES,
    Judged,
    Metrics,
    Seen,
    cispo,
    divergence,
    measure,
    negative_log_likelihood,
)

CAP = 5.0
SAMPLE = np.repeat(np.arange(8), [1, 3, 5, 7, 9, 11, 13, 15])  # of 64 occurrences
EXTREME = np.float64([-900, -40, 0, 40, 900])  # log ratios


def drawn(seed: int) -> dict[str, np.ndarray]:
    """Occurrences in float64: most ratios near 1, some far, some beyond what exp holds."""
    rng = np.random.default_rng(seed)
    logp, spread = rng.normal(-3, 2, 64), np.where(rng.random(64) < 0.5, 0.2, 2)
    anchor = logp - spread * rng.normal(0, 1, 64)
    old = anchor - spread * rng.normal(0, 1, 64)
    anchor[:5], old[:5] = logp[:5] - EXTREME, logp[:5] - EXTREME
    return {"logp": logp, "old_logp": old, "anchor": anchor, "advantage": rng.normal(0, 1, 64)}


def sequence_of(x: dict[str, np.ndarray], sample: np.ndarray = SAMPLE) -> np.ndarray:
    """Mean log ratio of each occurrence's `sample`."""
    delta = x["logp"] - x["anchor"]
    return (np.bincount(sample, delta) / np.maximum(1, np.bincount(sample)))[sample]


def ours(x: dict[str, np.ndarray], cfg: LossConfig) -> tuple[Any, Any, Any]:
    """Value, gradient by logp and what is clipped."""
    with jax.enable_x64(True):

        def loss(logp: jax.Array) -> tuple[jax.Array, Judged]:
            rest = {k: jnp.asarray(v) for k, v in x.items() if k != "logp"}
            seen = Seen(logp=logp, sequence=jnp.asarray(sequence_of(x)), **rest)
            judged = LOSSES[cfg.kind](seen, cfg, CAP)
            return jnp.sum(judged.loss), judged

        slopes, judged = jax.grad(loss, has_aux=True)(jnp.asarray(x["logp"]))
        return np.asarray(judged.loss), np.asarray(slopes), np.asarray(judged.clipped)


def by_hand(
    x: dict[str, np.ndarray], cfg: LossConfig, sample: np.ndarray = SAMPLE, cap: float = CAP
) -> tuple[Any, Any, Any]:
    """The same, from the papers' formulas."""
    logp, old, anchor, a = (x[k] for k in ("logp", "old_logp", "anchor", "advantage"))
    least, most = cfg.bounds
    with np.errstate(over="ignore"):
        ratio, behaviour = np.exp(logp - anchor), np.exp(anchor - old)
        bounded = np.exp(np.clip(logp - anchor, -20, 20))
        whole = np.exp(np.clip(sequence_of(x, sample), -20, 20))
    out = ((a > 0) & (ratio > most)) | ((a < 0) & (ratio < least))
    flat = out | (np.abs(logp - anchor) > 20)
    clipped_value = -np.where(out, np.clip(ratio, least, most), bounded) * a
    clipped_slope = np.where(flat, 0, -bounded * a)
    if cfg.kind == "cispo":
        capped = np.minimum(ratio, cap)
        drop = out if cfg.mask else np.zeros(len(a), bool)
        return (
            np.where(drop, 0, -capped * a * logp),
            np.where(drop, 0, -capped * a),
            (drop | (ratio > cap)),
        )
    if cfg.kind == "clip":
        return clipped_value, clipped_slope, out
    if cfg.kind == "gspo":
        out = ((a > 0) & (whole > most)) | ((a < 0) & (whole < least))
        held = np.where(out, np.clip(whole, least, most), whole)
        return -held * a, np.where(out, 0, -whole * a), out
    weight, capped = np.minimum(behaviour, cap), behaviour > cap
    if cfg.kind == "decoupled":
        return weight * clipped_value, weight * clipped_slope, out | capped
    if cfg.kind == "tis":
        return -weight * a * logp, -weight * a, capped
    return -a * logp, -a, np.zeros(len(a), bool)


CONFIGS = [
    *(LossConfig(kind=kind) for kind in KINDS),
    LossConfig(kind="clip", eps_low=1.0, eps_high=3.0),
    LossConfig(kind="cispo", mask=True, eps_low=0.3, eps_high=0.5),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.kind + "+mask" * c.mask)
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_clipping_are_those_of_the_formula(seed: int, cfg: LossConfig) -> None:
    x = drawn(seed)
    found, wanted = ours(x, cfg), by_hand(x, cfg)
    for one, other in zip(found, wanted, strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert wanted[2].any() == (cfg.kind != "reinforce")
    assert not wanted[2].all()


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_gradient_is_that_of_reinforce(kind: str) -> None:
    x = drawn(0)
    x |= {"old_logp": x["logp"], "anchor": x["logp"]}
    _, slopes, clipped = ours(x, LossConfig(kind=kind))
    np.testing.assert_allclose(slopes, -x["advantage"], rtol=1e-12)
    assert not clipped.any()


def test_the_gradient_of_gspo_is_that_of_its_samples_objective() -> None:
    """Of the mean over samples of min(s A, clip(s) A), s a function of all the sample's logp."""
    x, cfg = drawn(1), LossConfig(kind="gspo", eps_low=0.2, eps_high=0.3)
    x["advantage"] = x["advantage"][np.searchsorted(SAMPLE, SAMPLE)]  # one for each sample
    first = np.unique(SAMPLE, return_index=True)[1]
    count = np.bincount(SAMPLE)
    with jax.enable_x64(True):

        def objective(logp: jax.Array) -> jax.Array:
            delta = jnp.zeros(8).at[SAMPLE].add(logp - x["anchor"]) / count
            s, a = jnp.exp(jnp.clip(delta, -20, 20)), x["advantage"][first]
            return -jnp.sum(jnp.minimum(s * a, jnp.clip(s, 0.8, 1.3) * a))

        value, wanted = jax.value_and_grad(objective)(jnp.asarray(x["logp"]))
    loss, slopes, _ = ours(x, cfg)
    inside = np.abs(sequence_of(x)) < 20
    assert (loss / count[SAMPLE]).sum() == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose((slopes / count[SAMPLE])[inside], wanted[inside], rtol=1e-12)


def test_a_capped_token_keeps_its_gradient_and_a_clipped_one_loses_it() -> None:
    x = drawn(0) | {"anchor": drawn(0)["logp"] - 8, "advantage": np.full(64, 2.0)}
    assert set(ours(x, LossConfig())[1]) == {-CAP * 2}
    assert set(ours(x, LossConfig(kind="clip"))[1]) == {0.0}


def test_divergence_is_least_at_the_other_policy() -> None:
    logp = jnp.linspace(-800.0, 0.0, 801)
    found, slope = jax.jvp(lambda x: divergence(x, jnp.float32(-400)), (logp,), (jnp.ones(801),))
    assert np.all(np.isfinite(found))
    assert np.all(np.isfinite(slope))
    assert float(found[400]) == 0
    assert np.all(np.delete(found, 400) > 0)
    assert np.all(slope[381:400] < 0)
    assert np.all(slope[401:420] > 0)


def test_likelihood_looks_at_nothing_else() -> None:
    logp, nan = np.float32([-1.0, -2.0]), np.float32([np.nan, np.nan])
    seen = Seen(logp=logp, old_logp=nan, anchor=nan, sequence=nan, advantage=nan)
    assert negative_log_likelihood(seen, LossConfig(), CAP).loss.tolist() == [1.0, 2.0]


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    logp, old, entropy = rng.normal(-2, 1.5, (3, 40)).astype(np.float32)
    weight = np.float32(rng.random(40) < 0.8)
    logp[weight == 0] = 50.0  # what stands at padding must not matter, however large
    clipped = np.exp(logp - old) > CAP

    def of(part: slice) -> Metrics:
        return measure(logp[part], old[part], entropy[part], clipped[part], weight[part])

    whole = of(slice(0, 40)).values()
    parts = (of(slice(0, 13)) + of(slice(13, 40))).values()
    assert parts == pytest.approx(whole, rel=1e-5)
    real = weight > 0
    delta = (logp - old)[real].astype(np.float64)
    assert whole["ratio_mean"] == pytest.approx(np.exp(delta).mean(), rel=1e-5)
    assert whole["clip_share"] == pytest.approx((np.exp(delta) > CAP).mean(), rel=1e-5)
    assert whole["kl"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "grpo"}, "kind='grpo'"),
    ({"eps_low": 0.2}, "eps_low=0.2 is not looked at"),
    ({"kind": "reinforce", "eps_high": 0.2}, "eps_high=0.2 is not looked at"),
    ({"kind": "clip", "mask": True}, "mask=True goes with kind=cispo"),
    ({"mask": True, "eps_low": 0.2}, "eps_high=None"),
    ({"kind": "clip", "eps_low": 1.5}, "eps_low=1.5"),
    ({"kind": "clip", "eps_high": 0.0}, "eps_high=0.0"),
    ({"anchor": "reference"}, "anchor='reference'"),
    ({"kind": "tis", "anchor": "sampler"}, "anchor=sampler"),
    ({"kind": "decoupled", "anchor": "sampler"}, "anchor=sampler"),
    ({"kind": "reinforce", "anchor": "trainer"}, "kl=0.0"),
    ({"kl": -1.0}, "kl=-1.0"),
    ({"kl": 0.1, "reference": "base"}, "reference='base'"),
    ({"reference": "start"}, "kl=0.0"),
    ({"kind": "reinforce", "anchor": "trainer", "kl": 0.1, "reference": "start"}, "not from the a"),
    ({"entropy": -1.0}, "entropy=-1.0"),
    ({"kl": float("inf")}, "kl=inf"),
    ({"per": "turn"}, "per='turn'"),
    ({"per": "constant"}, "per=constant needs constant"),
    ({"constant": 3.0}, "constant=3.0"),
    ({"per": "constant", "constant": 0.0}, "constant=0.0"),
]


@pytest.mark.parametrize(("keys", "said"), REFUSED)
def test_a_key_that_does_nothing_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        LossConfig(**keys)


def test_a_cap_that_nothing_looks_at_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio_cap=4.0 is not looked at by loss.kind=clip"):
        check_cap(LossConfig(kind="clip"), 4.0)
    for kind in KINDS:
        check_cap(LossConfig(kind=kind), CAP)
    check_cap(LossConfig(kind="tis"), 4.0)
    assert cispo is LOSSES[LossConfig().kind]
