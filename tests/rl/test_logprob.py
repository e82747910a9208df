"""The chunked edge log-prob equals direct autodiff, and never holds [edges, vocab]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.rl.logprob import edge_logprob

N, E, V = 23, 16, 50


def direct(h, w, source, label, temperature):
    logits = (h[source] @ w) / temperature[:, None]
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0], entropy


def case(edges: int, dtype: str, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(N, E)), dtype),
        jnp.asarray(rng.normal(size=(E, V)), dtype),
        jnp.asarray(rng.integers(0, N, edges), jnp.int32),  # branch points: a source twice
        jnp.asarray(rng.integers(0, V, edges), jnp.int32),
        jnp.asarray(rng.choice([0.5, 1.0, 2.0], edges), dtype),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize(("edges", "chunk"), [(1, 4), (7, 4), (40, 16), (40, 64)])
def test_values_and_gradients(dtype: str, tolerance: float, edges: int, chunk: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        h, w, *rest = case(edges, dtype)
        rng = np.random.default_rng(1)
        pulls = tuple(jnp.asarray(rng.normal(size=edges), dtype) for _ in range(2))
        got, pull = jax.vjp(lambda h, w: edge_logprob(h, w, *rest, chunk=chunk), h, w)
        want, pull_direct = jax.vjp(lambda h, w: direct(h, w, *rest), h, w)
        for a, b in zip((*got, *pull(pulls)), (*want, *pull_direct(pulls)), strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance * max(1, float(jnp.abs(b).max())))


def test_an_edge_without_weight_has_no_gradient() -> None:
    h, w, *rest = case(12, "float32")
    padded = jnp.arange(12) < 7
    grad = jax.grad(
        lambda h: jnp.sum(jnp.where(padded, edge_logprob(h, w, *rest, chunk=4)[0], 0.0))
    )(h)
    only = jax.grad(lambda h: edge_logprob(h, w, *(x[:7] for x in rest), chunk=4)[0].sum())(h)
    np.testing.assert_allclose(grad, only, atol=1e-6)
    assert np.isfinite(grad).all()


def test_low_precision_weights_are_computed_in_float32() -> None:
    h, w, *rest = case(12, "float32")
    logp, entropy = edge_logprob(h.astype(jnp.bfloat16), w.astype(jnp.bfloat16), *rest, chunk=4)
    assert logp.dtype == entropy.dtype == jnp.float32
    rounded = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (h, w))
    np.testing.assert_allclose(logp, direct(*rounded, *rest)[0], atol=1e-4)


def test_nothing_of_edges_by_vocabulary_is_ever_made() -> None:
    edges, vocab, chunk = 4096, 3001, 256
    f32, i32 = jnp.float32, jnp.int32
    shapes = [((64, 8), f32), ((8, vocab), f32), ((edges,), i32), ((edges,), i32), ((edges,), f32)]
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]

    def loss(h, w, *rest):
        logp, entropy = edge_logprob(h, w, *rest, chunk=chunk)
        return logp.sum() + entropy.sum()

    largest = 0
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*specs))
    for word in text.replace("]", "[").split("["):
        if word and all(part.isdigit() for part in word.split(",")):
            largest = max(largest, int(np.prod([int(part) for part in word.split(",")])))
    assert largest < edges * vocab
    assert largest >= chunk * vocab  # the inspection does see the logits of a chunk
