"""Every implementation of tree attention equals the dense oracle: values and each gradient.

Random forests stand in for packed batches; causal and packed attention are their special
cases. fp64 is the strict gate, fp32 the one that training meets.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_forests import depths, fixed, forest

from forge_jax.attention.plan import TilePlan, build_plan, tree_plan
from forge_jax.attention.reference import reference_attention
from forge_jax.attention.tree import default_tile, layout_of, resolve, tree_attention
from forge_jax.config import UserError

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def inputs(t: int, s: int, h: int, k: int, d: int, seed: int, dtype: str) -> tuple:
    rng = np.random.default_rng(seed)
    shapes = ((t, h, d), (s, k, d), (s, k, d))
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def both(q, k, v, plan: TilePlan, ids: tuple, softcap: float | None = None) -> tuple:
    """(o, lse, dq, dk, dv) of the scan and of the oracle, for one random pair of cotangents."""
    scale = q.shape[-1] ** -0.5
    fast = partial(tree_attention, plan=plan, scale=scale, softcap=softcap, implementation="xla")
    horizon = jnp.asarray(plan.q_from[: len(q)])
    slow = partial(reference_attention, scale=scale, q_from=horizon, softcap=softcap)
    rng = np.random.default_rng(0)
    do = jnp.asarray(rng.normal(size=q.shape), q.dtype)
    dlse = jnp.asarray(rng.normal(size=(q.shape[1], q.shape[0])), q.dtype)

    def with_gradients(attend):
        def run(q, k, v):
            (o, lse), pull = jax.vjp(attend, q, k, v)
            return o, lse, *pull((do, jnp.where(jnp.isfinite(lse), dlse, 0).astype(lse.dtype)))

        return jax.jit(run)(q, k, v)

    return with_gradients(fast), with_gradients(lambda q, k, v: slow(q, k, v, *ids))


def assert_equal(got: tuple, want: tuple, tolerance: float) -> None:
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=name)
        scale = max(1.0, float(np.abs(b[finite]).max(initial=0)))
        worst = float(np.abs(a[finite] - b[finite]).max(initial=0))
        assert worst <= tolerance * scale, f"{name}: {worst} of {scale}"


def self_attention(exit_: np.ndarray, tile: int) -> tuple[TilePlan, tuple]:
    ids = np.arange(len(exit_), dtype=np.int32)
    return tree_plan(exit_, tile=tile, bucket=fixed), (ids, ids, exit_)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv", "n"),
    [
        ("float64", 2, 2, 37),
        ("float64", 4, 1, 61),
        ("float64", 8, 1, 37),
        ("float32", 4, 2, 61),
    ],
)
def test_equals_the_oracle(dtype: str, heads: int, kv: int, n: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        plan, ids = self_attention(forest(n, seed=n), tile=16)
        got, want = both(*inputs(n, n, heads, kv, 32, n, dtype), plan, ids)
        assert got[0].dtype == jnp.dtype(dtype)
        assert_equal(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "softcap"), [(5, None), (None, 2.0), (20, 1.0)])
def test_windows_and_softcaps(window: int | None, softcap: float | None) -> None:
    exit_ = forest(61, 4)
    ids = np.arange(61, dtype=np.int32)
    plan = tree_plan(exit_, depths(exit_), window, tile=8, bucket=fixed)
    with jax.enable_x64(True):
        q, k, v = inputs(61, 61, 4, 2, 32, 0, "float64")
        got, want = both(3 * q, k, v, plan, (ids, ids, exit_), softcap)
        assert_equal(got, want, TOLERANCE["float64"])


def test_keys_may_be_wider_than_queries() -> None:
    """They count as rounded, and their gradients come back unrounded."""
    plan, _ = self_attention(forest(40, 0), tile=8)
    q, k, v = inputs(40, 40, 4, 2, 16, 0, "float32")
    q = q.astype(jnp.bfloat16)

    def loss(k, v):
        o, lse = tree_attention(q, k, v, plan, scale=0.25)
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(lse)

    rounded = [x.astype(jnp.bfloat16) for x in (k, v)]
    assert loss(k, v) == loss(*rounded)
    wide, narrow = jax.grad(loss, (0, 1))(k, v), jax.grad(loss, (0, 1))(*rounded)
    for a, b in zip(wide, narrow, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a.astype(jnp.bfloat16), b)
    with pytest.raises(NotImplementedError, match="float32 queries over bfloat16"):
        tree_attention(q.astype(jnp.float32), *rounded, plan, scale=1.0)


def test_random_forests() -> None:
    """Many forests of one shape, so of one compilation."""
    q, k, v = inputs(30, 30, 2, 1, 8, 0, "float32")

    @jax.jit
    def fast(plan):
        def attend(q, k, v):
            return tree_attention(q, k, v, plan, scale=1.0)[0]

        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(jnp.sin(o))

    @jax.jit
    def slow(ids):
        def attend(q, k, v):
            return reference_attention(q, k, v, *ids, 1.0)[0]

        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(jnp.sin(o))

    for seed in range(40):
        exit_ = forest(30, seed)
        ids = np.arange(30, dtype=np.int32)
        plan = tree_plan(exit_, tile=8, bucket=lambda size: 32)
        for a, b in zip(fast(plan), slow((ids, ids, exit_)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 17])
def test_sizes_around_a_tile(n: int) -> None:
    plan, ids = self_attention(forest(n, 0), tile=16)
    got, want = both(*inputs(n, n, 2, 1, 8, 0, "float32"), plan, ids)
    assert_equal(got, want, 1e-5)


@pytest.mark.parametrize("tile", [16, 64])
def test_the_tile_is_no_part_of_the_result(tile: int) -> None:
    plan, ids = self_attention(forest(70, 3), tile=tile)
    got, want = both(*inputs(70, 70, 4, 2, 16, 1, "float32"), plan, ids)
    assert_equal(got, want, 1e-5)


@pytest.mark.slow
def test_long_rows_of_tiles() -> None:
    """More live key tiles in a row than one step takes on."""
    exit_ = np.full(140, 140, np.int32)
    plan, ids = self_attention(exit_, tile=4)
    got, want = both(*inputs(140, 140, 2, 1, 8, 2, "float32"), plan, ids)
    assert_equal(got, want, 1e-5)


def test_causal_and_packed_attention_are_special_cases() -> None:
    q, k, v = inputs(48, 48, 2, 2, 16, 0, "float32")
    causal = tree_plan(np.full(48, 48, np.int32), tile=16, bucket=fixed)
    o, _ = tree_attention(q, k, v, causal, scale=0.25)
    dense = jax.nn.dot_product_attention(q[None], k[None], v[None], scale=0.25, is_causal=True)
    np.testing.assert_allclose(o, dense[0], atol=1e-5)
    segments = tree_plan(np.repeat([20, 48], [20, 28]).astype(np.int32), tile=16, bucket=fixed)
    packed, _ = tree_attention(q, k, v, segments, scale=0.25)
    alone = jax.nn.dot_product_attention(
        q[None, 20:], k[None, 20:], v[None, 20:], scale=0.25, is_causal=True
    )
    np.testing.assert_allclose(packed[20:], alone[0], atol=1e-5)


def test_queries_and_keys_may_be_different_parts_of_a_forest() -> None:
    exit_ = forest(60, 5)
    q_id = np.arange(40, 60, dtype=np.int32)
    k_id = np.arange(0, 40, dtype=np.int32)
    plan = build_plan(q_id, k_id, exit_[:40], tile=8, bucket=fixed)
    got, want = both(*inputs(20, 40, 2, 1, 8, 0, "float32"), plan, (q_id, k_id, exit_[:40]))
    assert_equal(got, want, 1e-5)


def test_a_query_that_sees_nothing_is_zero_with_finite_gradients() -> None:
    ids = np.arange(24, dtype=np.int32)
    exit_ = ids.copy()  # nobody sees anybody
    exit_[8:] = 24
    plan = build_plan(ids, ids, exit_, tile=8, bucket=fixed)
    got, want = both(*inputs(24, 24, 2, 1, 8, 0, "float32"), plan, (ids, ids, exit_))
    assert_equal(got, want, 1e-5)
    assert not np.asarray(got[0][:8]).any()
    assert np.isneginf(got[1][:, :8]).all()
    assert not np.asarray(got[2][:8]).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_is_off_a_path_cannot_reach_it(poison: float) -> None:
    exit_ = np.array([12, 6, 6, 6, 6, 6, 12, 12, 12, 12, 12, 12], np.int32)  # a root, two branches
    plan, _ = self_attention(exit_, tile=4)
    q, k, v = inputs(12, 12, 2, 1, 8, 0, "float32")

    def second_branch(q, k, v):
        o, _ = tree_attention(q, k, v, plan, scale=1.0)
        return o[6:]

    clean, pull = jax.vjp(second_branch, q, k, v)
    other, pull_other = jax.vjp(second_branch, q, k.at[1:6].set(poison), v.at[1:6].set(poison))
    np.testing.assert_array_equal(clean, other)  # bit for bit
    for a, b in zip(pull(jnp.ones_like(clean)), pull_other(jnp.ones_like(clean)), strict=True):
        np.testing.assert_array_equal(a[6:], b[6:])


def test_bfloat16_is_as_close_as_its_own_rounding() -> None:
    plan, ids = self_attention(forest(50, 1), tile=16)
    q, k, v = inputs(50, 50, 4, 2, 16, 0, "float32")
    low = tuple(x.astype(jnp.bfloat16) for x in (q, k, v))
    o, lse = tree_attention(*low, plan, scale=0.25)
    want, _ = reference_attention(*(x.astype(jnp.float32) for x in low), *ids, 0.25)
    assert o.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(o.astype(jnp.float32), want, atol=2e-2)


def test_plans_of_one_bucket_share_one_compilation() -> None:
    traces = 0

    @jax.jit
    def attend(q, k, v, plan):
        nonlocal traces
        traces += 1
        return tree_attention(q, k, v, plan, scale=1.0)

    q, k, v = inputs(64, 64, 2, 1, 8, 0, "float32")
    for seed in range(5):
        attend(q, k, v, tree_plan(forest(64, seed), tile=16, bucket=lambda size: 64))
    assert traces == 1


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nothing_of_the_size_of_the_mask_is_made_but_by_the_reference(implementation: str) -> None:
    n = 2048
    plan = tree_plan(forest(n, 0), tile=16, bucket=fixed)
    shape = jax.ShapeDtypeStruct((n, 1, 8), jnp.float32)

    def loss(q, k, v):
        return tree_attention(q, k, v, plan, scale=1.0, implementation=implementation)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(shape, shape, shape))
    sides = re.findall(r"\[(\d+(?:,\d+)*)\]", text)
    largest = max(math.prod(map(int, found.split(","))) for found in sides)
    assert largest >= n * n if implementation == "reference" else largest < n * n / 4


def test_auto_is_what_suits_the_device_and_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, wide, narrow in (
        ("cpu", "xla", "xla"),
        ("tpu", "mosaic_tpu", "mosaic_tpu"),
        ("gpu", "xla", "mosaic_gpu"),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        for dtype, wanted in (("float32", wide), ("bfloat16", narrow)):
            assert resolve("auto", dtype) == wanted
            assert resolve("reference", dtype) == "reference"
            assert layout_of("auto", dtype) == ("steps" if wanted == "xla" else "tiles")
            rows, columns = default_tile("auto", dtype)
            assert rows == columns == {"xla": 64, "mosaic_tpu": 512, "mosaic_gpu": 128}[wanted]
    monkeypatch.setattr(jax, "default_backend", lambda: "metal")
    with pytest.raises(NotImplementedError, match="attention on metal: choose attention=xla"):
        resolve("auto", "float32")


def test_mistakes_are_named() -> None:
    plan, _ = self_attention(forest(16, 0), tile=8)
    q, k, v = inputs(16, 16, 2, 1, 8, 0, "float32")
    with pytest.raises(UserError, match="'cudnn' is unknown"):
        tree_attention(q, k, v, plan, scale=1.0, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="int32"):
        tree_attention(*(x.astype(jnp.int32) for x in (q, k, v)), plan, scale=1.0)
    with pytest.raises(ValueError, match="for a plan of"):
        tree_attention(*inputs(32, 32, 2, 1, 8, 0, "float32"), plan, scale=1.0)
    with pytest.raises(ValueError, match="no multiple"):
        tree_attention(*inputs(16, 16, 3, 2, 8, 0, "float32"), plan, scale=1.0)
    with pytest.raises(ValueError, match=r"softcap=0\.0 must be positive"):
        tree_attention(q, k, v, plan, scale=1.0, softcap=0.0)
    tiles = tree_plan(forest(16, 0), tile=8, layout="tiles", bucket=fixed)
    with pytest.raises(ValueError, match="a plan of tiles for xla"):
        tree_attention(q, k, v, tiles, scale=1.0)
