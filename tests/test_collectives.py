"""Collectives have the backward passes of the functions that their ranks compute together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding

from forge_jax import collectives
from forge_jax.sharding import make_mesh

RANKS = 4
AXES = [("tensor",), ("fsdp", "expert")]
TOKENS, WIDTH, HIDDEN = 8, 4, 12


def drawn(seed: int) -> tuple[Array, Array, Array, Array]:
    """Tokens, two weights and a cotangent, float64."""
    rng = np.random.default_rng(seed)
    shapes = [(TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (TOKENS, WIDTH)]
    return tuple(jnp.asarray(rng.normal(size=shape)) for shape in shapes)


def alone(x: Array, up: Array, down: Array) -> Array:
    return jnp.tanh(x) + jnp.sin(x @ up) @ down


def gradients(f: Callable[..., Array], args: tuple[Array, ...], pull: Array) -> Any:
    """The value of f and its gradients by all arguments, for the cotangent `pull`."""
    value, back = jax.vjp(f, *args)
    return value, back(pull)


def mapped(rank: Callable[..., Any], axes: tuple[str, ...], specs: Any, out: Any) -> Any:
    """`rank` on all ranks of `axes`, of arguments that are cut as `specs` say."""
    mesh = make_mesh(**dict.fromkeys(axes, RANKS if len(axes) == 1 else 2))
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

    def call(*args: Any) -> Any:
        pairs = zip(args, specs, strict=True)
        return run(*(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs))

    return call


def assert_equal(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, atol=1e-12)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_ranks_compute_in_parts_of_the_same_tokens(axes: tuple[str, ...]) -> None:
    """Hidden units are cut; tokens, and so their gradients, are the same on all ranks."""
    every, columns, rows = jax.P(), jax.P(None, axes), jax.P(axes)

    def rank(x: Array, up: Array, down: Array, pull: Array) -> Any:
        def f(x: Array, up: Array, down: Array) -> Array:
            inside = jnp.sin(collectives.enter(x, axes) @ up)
            return jnp.tanh(x) + collectives.leave(inside @ down, axes)

        return gradients(f, (x, up, down), pull)

    with jax.enable_x64(True):
        *args, pull = drawn(0)
        run = mapped(rank, axes, (every, columns, rows, every), (every, (every, columns, rows)))
        assert_equal(run(*args, pull), gradients(alone, tuple(args), pull))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_ranks_lend_each_other_for_tokens_of_their_own(axes: tuple[str, ...]) -> None:
    """Weights are cut along either side and whole where used; gradients of a rank's part
    are summed over the tokens of all."""
    own, columns, rows = jax.P(axes), jax.P(None, axes), jax.P(axes)

    def rank(x: Array, up: Array, down: Array, pull: Array) -> Any:
        def f(x: Array, up: Array, down: Array) -> Array:
            up = collectives.weights(up, axes, 0, jnp.float64)
            return alone(x, up, collectives.weights(down, axes, 1, jnp.float64))

        return gradients(f, (x, up, down), pull)

    with jax.enable_x64(True):
        *args, pull = drawn(1)
        run = mapped(rank, axes, (own, rows, columns, own), (own, (own, rows, columns)))
        assert_equal(run(*args, pull), gradients(alone, tuple(args), pull))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_ranks_compute_for_the_tokens_of_all(axes: tuple[str, ...]) -> None:
    """Every rank's hidden units see all tokens, and each rank gets the sum for its own."""
    own, columns, rows = jax.P(axes), jax.P(None, axes), jax.P(axes)

    def rank(x: Array, up: Array, down: Array, pull: Array) -> Any:
        def f(x: Array, up: Array, down: Array) -> Array:
            inside = jnp.sin(collectives.whole(x, axes) @ up)
            return jnp.tanh(x) + collectives.shared_sum(inside @ down, axes)

        return gradients(f, (x, up, down), pull)

    with jax.enable_x64(True):
        *args, pull = drawn(2)
        run = mapped(rank, axes, (own, columns, rows, own), (own, (own, columns, rows)))
        assert_equal(run(*args, pull), gradients(alone, tuple(args), pull))


@pytest.mark.parametrize("wide", [False, True])
def test_gradients_of_halves_are_summed_before_they_are_rounded(wide: bool) -> None:
    """256 + 3 times 1 is 260 in bfloat16, where every single sum would stay at 256."""
    axes = ("tensor",)
    each = np.array([[256.0], [1.0], [1.0], [1.0]])

    def rank(x: Array, stored: Array, pull: Array) -> Any:
        _, back = jax.vjp(partial(collectives.whole, axes=axes, wide=wide), x)
        scaled = jnp.broadcast_to(pull, (RANKS, 1))
        [d_x] = back(scaled.astype(jnp.float32 if wide else jnp.bfloat16))
        lent, back = jax.vjp(lambda w: collectives.weights(w, axes, 0, jnp.bfloat16), stored)
        assert lent.dtype == jnp.bfloat16
        [d_stored] = back(scaled.astype(jnp.bfloat16))
        return d_x, d_stored

    one = jax.P(axes)
    run = mapped(rank, axes, (one, one, one), (one, one))
    d_x, d_stored = run(np.ones((RANKS, 1), jnp.bfloat16), np.ones((RANKS, 1), np.float32), each)
    assert d_x.dtype == jnp.bfloat16
    assert d_stored.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(d_x, np.float32), np.full((RANKS, 1), 260))
    np.testing.assert_array_equal(d_stored, np.full((RANKS, 1), 259))


def test_without_axes_nothing_happens() -> None:
    x = jnp.ones((3, 2))
    for f in (collectives.enter, collectives.leave, collectives.whole, collectives.shared_sum):
        assert f(x, ()) is x
    assert collectives.weights(x, (), 0, jnp.bfloat16).dtype == jnp.bfloat16
