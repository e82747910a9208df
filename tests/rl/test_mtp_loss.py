"""The loss of prediction modules at its edges: bounds, gradients, and numbers that round to 0."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_mtp import divergence
from test_step import precision

from forge_jax.config import MtpConfig
from forge_jax.rl import mtp

guesses = jax.jit(mtp.guesses, static_argnames=("cfg", "chunk"))


def logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Any:
    """Two sets of states and an unembedding whose products are any logits."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=(3, rows, vocab))), jnp.eye(vocab)


def test_the_bucketed_divergence_is_a_lower_bound_that_grows() -> None:
    rows, vocab, temperature = 50, 11, 0.5
    with precision("float64"):
        (h, *states), w = logits(rows, vocab)
        edges = np.arange(rows), np.full(rows, temperature)
        found = [
            guesses(h, jnp.stack(states), w, *edges, MtpConfig(top_k=k), chunk=7)
            for k in (1, 4, vocab - 1, vocab, 2 * vocab)
        ]
        p, q = (
            np.asarray(jax.nn.softmax(x / temperature, axis=-1)) for x in (h, jnp.stack(states))
        )
    full = np.sum(p[None] * np.log(p[None] / q), axis=-1)
    accepted = np.sum(np.minimum(p[None], q), axis=-1)
    kl = np.stack([guess.kl for guess in found])
    assert kl.min() >= 0
    assert np.all(np.diff(kl, axis=0) >= -1e-12)
    assert np.all(kl[0] < full)
    for exact in kl[-3:]:  # the rest is one word, or none
        np.testing.assert_allclose(exact, full, rtol=1e-10)
    for guess in found:
        np.testing.assert_allclose(guess.accepted, accepted, rtol=1e-10)
        np.testing.assert_array_equal(guess.agrees, np.argmax(q, -1) == np.argmax(p, -1)[None])


@pytest.mark.parametrize(("top_k", "decay"), [(3, 2.0), (11, 0.0)])
def test_the_gradient_is_that_of_the_formula(top_k: int, decay: float) -> None:
    rows, vocab, temperature = 9, 11, 0.7
    cfg = MtpConfig(top_k=top_k, decay=decay)
    with precision("float64"):
        (h, *states), w = logits(rows, vocab)
        weight = np.random.default_rng(1).normal(size=(2, rows))
        source = np.random.default_rng(2).integers(0, rows, rows)  # some edges share a source

        def ours(states: Any) -> Any:
            edges = source, np.full(rows, temperature)
            return jnp.sum(weight * guesses(h, states, w, *edges, cfg, chunk=4).loss)

        def naive(states: Any) -> Any:
            each = jax.vmap(partial(divergence, k=top_k))
            kl, accepted = jax.vmap(
                lambda s: each(h[source] / temperature, s[source] / temperature)
            )(states)
            share = jax.lax.stop_gradient(jnp.exp(-decay * accepted))
            return jnp.sum(weight * (share * kl + (1 - share) * (1 - accepted)))

        states = jnp.stack(states)
        np.testing.assert_allclose(jax.grad(ours)(states), jax.grad(naive)(states), atol=1e-12)


def test_a_certain_policy_has_a_finite_loss() -> None:
    """Words whose probability rounds to 0 on either side, in float32."""
    h = jnp.asarray([[200.0, 0, -200, 0], [0, 0, 0, 0]], jnp.float32)
    states = jnp.asarray([[[-200.0, 0, 200, 0], [0, 0, 0, 0]]], jnp.float32)
    edges = np.arange(2), np.ones(2, np.float32)

    def loss(states: Any) -> Any:
        return jnp.sum(guesses(h, states, jnp.eye(4), *edges, MtpConfig(top_k=2)).loss)

    value, gradient = jax.value_and_grad(loss)(states)
    assert value == pytest.approx(400)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_allclose(gradient[0, 0], [-1, 0, 1, 0], atol=1e-6)
