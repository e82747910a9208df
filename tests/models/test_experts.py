"""Each way to compute a mixture of experts equals all experts on all tokens: values and every
gradient, however the tokens are routed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from forge_jax.models import grouped
from forge_jax.models.experts import Experts, mixture
from forge_jax.models.grouped import outer_blocks, outer_tpu

TOLERANCE = {"float32": 2e-6, "float64": 1e-13}  # of a result, in relative L2
X, E, F = 5, 12, 20


def everywhere(x: Any, chosen: Any, weight: Any, layer: Experts) -> jax.Array:
    """The oracle: all experts on all tokens, of which the chosen ones count."""
    counts = jnp.sum(
        jnp.where(chosen[..., None] == jnp.arange(X)[None, None], weight[..., None], 0), axis=1
    )
    gated = jax.nn.silu(jnp.einsum("te,xef->txf", x, layer.gate))
    gated = gated * jnp.einsum("te,xef->txf", x, layer.up)
    return jnp.einsum("txf,xfe,tx->te", gated, layer.down, counts)


def routed(kind: str, rng: np.random.Generator, t: int, k: int) -> np.ndarray:
    free = rng.permuted(np.tile(np.arange(X), (t, 1)), axis=1)[:, :k]
    if kind == "one takes all":
        return np.full((t, k), 3)
    if kind == "some are empty":
        return np.where(free % 2, 1, 4)
    if kind == "elsewhere":
        return free * 3 - 4  # -4, -1, 2, 5, 8: most are none of these experts
    return free


def with_gradients(run: Any, x: Any, chosen: Any, weight: Any, layer: Experts, dy: Any) -> Any:
    y, pull = jax.vjp(lambda x, w, layer: run(x, chosen, w, layer), x, weight, layer)
    return y, *pull(dy)


fast = jax.jit(
    lambda *args, implementation, chunk: with_gradients(
        partial(mixture, implementation=implementation, chunk=chunk), *args
    ),
    static_argnames=("implementation", "chunk"),
)
slow = jax.jit(lambda *args: with_gradients(everywhere, *args))


def problem(kind: str, t: int, k: int, dtype: str) -> tuple:
    rng = np.random.default_rng(t)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    layer = Experts(normal(X, E, F), normal(X, E, F), normal(X, F, E))
    return normal(t, E), jnp.asarray(routed(kind, rng, t, k)), normal(t, k), layer, normal(t, E)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    names = ("y", "dx", "dweight", "dgate", "dup", "ddown")
    for name, a, b in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30), name


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize(
    ("kind", "t", "k", "dtype"),
    [
        ("free", 203, 2, "float64"),
        ("free", 203, 2, "float32"),
        ("one takes all", 70, 1, "float64"),
        ("some are empty", 70, 2, "float64"),
        ("elsewhere", 70, 3, "float64"),
        ("free", 1, 1, "float64"),
        ("free", 0, 2, "float32"),
    ],
)
def test_equals_all_experts_on_all_tokens(implementation, kind, t, k, dtype) -> None:
    with jax.enable_x64(dtype == "float64"):
        args = problem(kind, t, k, dtype)
        got = fast(*args, implementation=implementation, chunk=64)
        assert_close(got, slow(*args), TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
def test_16_bit_inputs_are_summed_in_32(implementation) -> None:
    """Every expert gives the same small number: 16-bit sums would lose them one by one."""
    t = 4096
    x, layer = jnp.ones((t, 1), jnp.bfloat16), Experts(*jnp.full((3, 1, 1, 1), 1, jnp.bfloat16))
    chosen, weight = jnp.zeros((t, 1), jnp.int32), jnp.full((t, 1), 1.0)
    args = (x, chosen, weight, layer, jnp.ones_like(x))
    *_, grads = fast(*args, implementation=implementation, chunk=64)
    one = float(jax.nn.silu(jnp.ones(())))
    np.testing.assert_allclose(np.float64(grads.down), t * one, rtol=0.01)


def test_experts_without_tokens_are_not_computed_with() -> None:
    x, chosen, weight, layer, dy = problem("some are empty", 70, 2, "float32")
    idle = np.isin(np.arange(X), chosen, invert=True)
    broken = Experts(*(jnp.where(idle[:, None, None], jnp.nan, w) for w in layer))
    got = fast(x, chosen, weight, broken, dy, implementation="blocks", chunk=64)
    want = fast(x, chosen, weight, layer, dy, implementation="blocks", chunk=64)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_auto_goes_by_the_platform_it_is_compiled_for() -> None:
    """Not by the machine that compiles: a CPU can compile for accelerators."""
    args = jax.eval_shape(lambda: problem("free", 64, 2, "float32"))
    traced = fast.trace(*args, implementation="auto", chunk=64)
    for platform, ragged in (("cpu", False), ("tpu", True), ("cuda", True)):
        assert ("ragged_dot" in traced.lower(lowering_platforms=(platform,)).as_text()) is ragged


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match="implementation='dense' must be one of auto, blocks"):
        mixture(*problem("free", 3, 1, "float32")[:4], implementation="dense")


@pytest.mark.parametrize("sizes", [(100, 0, 57, 300, 0), (0, 0, 0, 0, 1)])
@pytest.mark.parametrize("outer", [outer_blocks, partial(outer_tpu, interpret=True)])
def test_gradients_of_matrices_are_summed_by_group(monkeypatch, outer, sizes) -> None:
    monkeypatch.setattr(grouped, "BLOCK", 32)
    monkeypatch.setattr(grouped, "TILE", (128, 128, 128))
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(500, side)).astype(np.float32) for side in (128, 256))
    got = outer(jnp.asarray(a), jnp.asarray(b), jnp.asarray(sizes, jnp.int32))
    for x, end in enumerate(np.cumsum(sizes)):
        of = slice(end - sizes[x], end)
        np.testing.assert_allclose(got[x], np.float64(a[of]).T @ b[of], rtol=1e-4, atol=1e-4)


def test_work_on_a_tpu_is_that_of_the_rows(monkeypatch) -> None:
    """However many experts there are, forward and backward, as the compiler counts it."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    # Nothing is asked of a cloud, and other processes may compile at the same time.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    t, k, e, f, x = 4096, 2, 512, 256, 64
    shapes = ((t, e), (t, k), (x, e, f), (x, e, f), (x, f, e))
    h, weight, *layer = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes)
    chosen = jax.ShapeDtypeStruct((t, k), jnp.int32, sharding=sharding)
    compiled = fast.lower(
        h, chosen, weight, Experts(*layer), h, implementation="auto", chunk=t * k
    ).compile()
    product = 2 * t * k * e * f  # 3 forward; backward 2 of them again and 2 x 3 gradients
    assert 11 <= compiled.cost_analysis()["flops"] / product < 11.5
