"""Laws of the sampler: the right distribution, from one uniform a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.rollout.jobs import seed_words
from forge_jax.rollout.sampling import request_key, sample

COUNT, VOCAB = 4096, 300
draw = jax.jit(sample)


@jax.jit
def uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
    return jax.vmap(lambda k, p: jax.random.uniform(jax.random.fold_in(k, p)))(keys, position)


def keys(seed: int, count: int = COUNT) -> jax.Array:
    words = np.random.default_rng(seed).integers(0, 2**32, (count, 2), np.uint32)
    return jax.random.wrap_key_data(jax.device_put(words), impl="threefry2x32")


def test_frequencies_are_the_softmax() -> None:
    values = np.full(VOCAB, -np.inf, np.float32)
    values[::9] = np.random.default_rng(0).normal(0, 1.5, len(values[::9]))
    logits = np.tile(values, (COUNT, 1))
    for temperature in (0.5, 1.0, 2.0):
        scores = np.asarray(jax.nn.log_softmax(values / np.float32(temperature)))
        seen, scale = np.zeros(VOCAB), np.full(COUNT, temperature, np.float32)
        for position in range(5):
            tokens, logp = draw(logits, scale, keys(1), np.full(COUNT, position, np.int32))
            np.testing.assert_allclose(logp, scores[np.asarray(tokens)], atol=1e-5)
            seen += np.bincount(tokens, minlength=VOCAB)
        want = 5 * COUNT * np.exp(scores)
        likely = want > 5
        chi2 = np.sum((seen - want)[likely] ** 2 / want[likely])
        assert chi2 < likely.sum() + 5 * np.sqrt(2 * likely.sum())


@pytest.mark.parametrize(("count", "vocab"), [(3, 1), (COUNT, VOCAB), (256, 5000)])
def test_the_token_is_that_of_the_plain_inverse_cdf(count: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (count, vocab)).astype(np.float32)
    position = rng.integers(0, 1000, count).astype(np.int32)
    tokens, _ = draw(logits, np.ones(count, np.float32), keys(2, count), position)
    cdf = np.cumsum(np.exp(logits.astype(np.float64)), axis=-1)
    target = np.asarray(uniforms(keys(2, count), position), np.float64) * cdf[:, -1]
    plain = np.sum(cdf <= target[:, None], axis=-1)
    # fp32 sums may put a uniform that falls on a border to either side of it.
    assert np.mean(tokens == plain) > 0.99
    assert np.max(np.abs(tokens - plain)) <= 1


@pytest.mark.parametrize("holes", [0.5, 0.99])
def test_a_token_of_probability_zero_is_never_drawn(holes: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 30, (COUNT, VOCAB)).astype(np.float32)
    logits[rng.random(logits.shape) < holes] = -np.inf
    logits[:, 7] = 0.0  # something is always possible
    ones, position = np.ones(COUNT, np.float32), np.zeros(COUNT, np.int32)
    tokens, logp = draw(logits, ones, keys(3), position)
    assert np.isfinite(np.asarray(logp)).all()
    assert np.isfinite(logits[np.arange(COUNT), np.asarray(tokens)]).all()


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((COUNT, VOCAB), np.float32)
    logits[:, [19, 20, 200]] = 3.0
    zeros, position = np.zeros(COUNT, np.float32), np.arange(COUNT, dtype=np.int32)
    tokens, logp = draw(logits, zeros, keys(4), position)
    assert set(np.asarray(tokens).tolist()) == {19}
    assert not np.asarray(logp).any()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**40 + 3, 2**64 - 1, -1])
def test_keys_are_those_of_jax(seed: int) -> None:
    """``fold_in(key(seed), choice)`` for every seed that fits in 64 bits."""
    high, low = np.array([seed_words(seed)], np.uint32).view(np.int32).T
    with jax.enable_x64():
        want = jax.random.fold_in(jax.random.key(np.int64(np.uint64(seed % 2**64))), 5)
    made = request_key(jnp.asarray(high), jnp.asarray(low), jnp.array([5]))
    np.testing.assert_array_equal(jax.random.key_data(made[0]), jax.random.key_data(want))
