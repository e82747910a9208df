"""The chunked edge log-prob equals direct autodiff, and never holds [edges, vocab]."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from forge_jax.rl.logprob import edge_logprob
from forge_jax.sharding import make_mesh

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


def test_products_are_of_whole_factors_on_any_device() -> None:
    h, w, *rest = case(12, "float32")

    def loss(h, w):
        return sum(x.sum() for x in edge_logprob(h, w, *rest, chunk=4))

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(h, w).as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == text.count("stablehlo.dot_general") > 0


@pytest.mark.parametrize("ranks", [1, 8])
def test_nothing_of_edges_by_vocabulary_is_ever_made(ranks: int) -> None:
    edges, columns, chunk = 4096, 3001, 256
    f32, i32 = jnp.float32, jnp.int32
    shapes = [((64, 8), f32), ((8, columns * ranks), f32)]
    shapes += [((edges,), i32), ((edges,), i32), ((edges,), f32)]
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    every, cut = jax.P(), jax.P(None, "tensor")

    def loss(h, w, *rest):
        logp, entropy = edge_logprob(h, w, *rest, chunk=chunk, axis="tensor" if ranks > 1 else None)
        return logp.sum() + entropy.sum()

    if ranks > 1:
        mesh = make_mesh(tensor=ranks)
        specified = (every, cut, every, every, every)
        loss = jax.shard_map(loss, mesh=mesh, in_specs=specified, out_specs=every, check_vma=False)
        specs[1] = jax.ShapeDtypeStruct(*shapes[1], sharding=NamedSharding(mesh, cut))
    largest = 0
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*specs))
    for word in text.replace("]", "[").split("["):
        if word and all(part.isdigit() for part in word.split(",")):
            largest = max(largest, int(np.prod([int(part) for part in word.split(",")])))
    assert largest < edges * columns
    assert largest >= chunk * columns  # the inspection does see the logits of a chunk


@jax.jit
def cut_over_ranks(h, w, source, label, temperature, pulls):
    """Values and gradients with the vocabulary of 50 cut over 8 ranks, the last one padded."""
    mesh = make_mesh(tensor=8)
    every, columns = jax.P(), jax.P(None, "tensor")

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(every, columns),
        out_specs=(every, (every, columns)),
        check_vma=False,
    )
    def head(h, w):
        rest = (source, label, temperature)
        values, pull = jax.vjp(
            lambda h, w: edge_logprob(h, w, *rest, chunk=4, axis="tensor", vocab=V), h, w
        )
        return values, pull(pulls)

    padded = jax.reshard(jnp.pad(w, ((0, 0), (0, -V % 8))), NamedSharding(mesh, columns))
    values, (dh, dw) = head(h, padded)
    dw = jax.reshard(dw, NamedSharding(mesh, every))
    return (*values, dh, dw[:, :V]), dw[:, V:]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_a_vocabulary_cut_over_ranks_is_the_whole_one(dtype: str, tolerance: float) -> None:
    edges = 23
    with jax.enable_x64(dtype == "float64"):
        h, w, *rest = case(edges, dtype)
        rng = np.random.default_rng(1)
        pulls = tuple(jnp.asarray(rng.normal(size=edges), dtype) for _ in range(2))
        found, padding = cut_over_ranks(h, w, *rest, pulls)
        values, pull = jax.vjp(lambda h, w: edge_logprob(h, w, *rest, chunk=4), h, w)
        for a, b in zip(found, (*values, *pull(pulls)), strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance * max(1, float(jnp.abs(b).max())))
        assert not np.any(padding)
