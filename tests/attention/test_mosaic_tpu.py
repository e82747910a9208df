"""The TPU kernels equal the dense oracle, values and each gradient, and compile for TPUs.

Interpreted on the CPU they take tiles of any size. Compiling needs no TPU, only its
compiler: the `libtpu` wheel.
"""

from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from random_forests import depths, fixed, forest

from forge_jax.attention.kernels.mosaic_tpu import TILE, attention
from forge_jax.attention.plan import TilePlan, build_plan, tree_plan
from forge_jax.attention.reference import reference_attention

NAMES = ("o", "lse", "dq", "dk", "dv")
WORST = {"float32": 2e-6, "bfloat16": 1e-2}  # of a result, in relative L2
FAST = partial(attention, interpret=True)


def tiles(exit_: np.ndarray, tile: tuple[int, int], window: int | None = None) -> TilePlan:
    depth = None if window is None else depths(exit_)
    return tree_plan(exit_, depth, window, tile=tile, layout="tiles", bucket=fixed)


def oracle(q, k, v, plan: TilePlan, *, scale: float, softcap: float | None = None) -> tuple:
    q_id, q_from = (jnp.asarray(x[: len(q)]) for x in (plan.q_id, plan.q_from))
    k_id, k_exit = (jnp.asarray(x[: len(k)]) for x in (plan.k_id, plan.k_exit))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return reference_attention(q, k, v, q_id, k_id, k_exit, scale, q_from=q_from, softcap=softcap)


def inputs(t: int, s: int, h: int, k: int, d: int, seed: int, dtype: str = "float32") -> tuple:
    """(q, k, v) and a cotangent of each result."""
    rng = np.random.default_rng(seed)
    shapes = ((t, h, d), (s, k, d), (s, k, d), (t, h, d))
    q, k, v, do = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, do, jnp.asarray(rng.normal(size=(h, t)), jnp.float32)


def traced(attend, q, k, v, do, dlse, plan, scale=0.125, softcap=None) -> tuple:
    """(o, lse, dq, dk, dv)."""
    attend = partial(attend, plan=plan, scale=scale, softcap=softcap)
    (o, lse), pull = jax.vjp(attend, q, k, v)
    return o, lse, *pull((do.astype(o.dtype), jnp.where(jnp.isfinite(lse), dlse, 0)))


STATIC = ("attend", "scale", "softcap")
# An interpreted kernel is compiled once and runs for milliseconds.
results = jax.jit(
    traced, static_argnames=STATIC, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_equal(got: tuple, want: tuple, worst: float) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=name)
        gap = np.linalg.norm(a[finite] - b[finite])
        assert gap <= worst * (1e-3 + np.linalg.norm(b[finite])), f"{name}: {gap}"


@pytest.mark.parametrize(
    ("dtype", "heads", "kv", "d", "tile", "window", "softcap"),
    [
        ("float32", 2, 2, 32, (16, 8), None, None),
        ("float32", 4, 1, 64, (8, 16), 7, None),
        ("float32", 8, 1, 128, (32, 16), None, 2.0),
        ("bfloat16", 4, 2, 256, (16, 16), 9, 1.5),
        ("bfloat16", 2, 1, 64, (16, 32), None, None),
    ],
)
def test_equals_the_oracle(dtype, heads, kv, d, tile, window, softcap) -> None:
    plan = tiles(forest(61, seed=d), tile, window)
    given = (*inputs(61, 61, heads, kv, d, d, dtype), plan)
    got = results(FAST, *given, softcap=softcap)
    want = results(oracle, *given, softcap=softcap)
    assert got[0].dtype == got[2].dtype == got[3].dtype == jnp.dtype(dtype)
    assert got[1].dtype == jnp.float32
    assert_equal(got, want, WORST[dtype])


def test_random_forests_share_one_compilation() -> None:
    given = inputs(30, 30, 2, 1, 8, 0)
    traces = 0

    def counted(*args, **kwargs):
        nonlocal traces
        traces += 1
        return FAST(*args, **kwargs)

    for seed in range(20):
        plan = tree_plan(forest(30, seed), tile=(8, 4), layout="tiles", bucket=lambda size: 40)
        assert_equal(
            results(counted, *given, plan), results(oracle, *given, plan), WORST["float32"]
        )
    assert traces == 1


@pytest.mark.parametrize("n", [0, 1, 8])
def test_sizes_around_a_tile(n: int) -> None:
    plan, given = tiles(forest(n, 0), (8, 8)), inputs(n, n, 2, 1, 8, 0)
    got, want = results(FAST, *given, plan), results(oracle, *given, plan)
    assert [x.shape for x in got] == [x.shape for x in want]
    assert_equal(got, want, WORST["float32"])


def test_queries_and_keys_may_be_different_parts_of_a_forest() -> None:
    """Also where neither fills its tiles, and keys come in another order."""
    exit_ = forest(60, 5)
    keys = np.random.default_rng(0).permutation(39).astype(np.int32)
    plan = build_plan(
        np.arange(41, 60), keys, exit_[keys], tile=(8, 16), layout="tiles", bucket=fixed
    )
    given = (*inputs(19, 39, 4, 2, 16, 0), plan)
    assert_equal(results(FAST, *given), results(oracle, *given), WORST["float32"])


def test_a_query_that_sees_nothing_is_zero_with_zero_gradients() -> None:
    """In an interpreter that hands out memory full of NaN and checks every bound."""
    strict = partial(attention, interpret=pltpu.InterpretParams())
    ids = np.arange(24, dtype=np.int32)
    exit_ = np.where(ids < 11, ids, 24).astype(np.int32)  # nobody sees the first eleven
    plan = build_plan(ids, ids, exit_, tile=(8, 8), layout="tiles", bucket=fixed)
    given = (*inputs(24, 24, 2, 1, 8, 0), plan)
    got, want = results(strict, *given), results(oracle, *given)
    assert_equal(got, want, WORST["float32"])
    assert np.isneginf(got[1][:, :11]).all()
    for name, x in zip(("o", "dq", "dk", "dv"), (got[0], *got[2:]), strict=True):
        assert not np.asarray(x[:11]).any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_off_a_path_cannot_reach_it(dtype: str) -> None:
    """Neither an unseen key or value, nor a query or cotangent of another branch."""
    exit_ = np.array([13, 6, 6, 6, 6, 6, *[13] * 7], np.int32)  # a root and two branches
    plan = tiles(exit_, (4, 4))
    q, k, v, do, dlse = inputs(13, 13, 2, 1, 8, 0, dtype)
    clean = results(FAST, q, k, v, do, dlse, plan)
    for poison in (np.nan, np.inf, 3e38):
        at = slice(1, 6)
        spoilt = (x.at[at].set(poison) for x in (q, k, v, do))
        other = results(FAST, *spoilt, dlse.at[:, at].set(poison), plan)
        for name, a, b in zip(NAMES, clean, other, strict=True):
            a, b = (x.T if name == "lse" else x for x in (a, b))
            # The root is seen by the spoilt branch, whose gradients do reach it.
            np.testing.assert_array_equal(a[6:], b[6:], err_msg=f"{name} {poison}")
        np.testing.assert_array_equal(clean[0][0], other[0][0])


def test_what_is_on_a_path_does_reach_it() -> None:
    plan, (q, k, v, do, dlse) = tiles(forest(8, 1), (4, 4)), inputs(8, 8, 2, 1, 8, 0)
    for spoilt in (
        (q.at[0].set(jnp.nan), k, v, do),
        (q, k.at[0].set(jnp.nan), v, do),
        (q, k, v.at[0].set(jnp.inf), do),
        (q, k, v, do.at[0].set(jnp.nan)),
    ):
        got = results(FAST, *spoilt, dlse, plan)
        assert all(np.isnan(x[0]).any() for x in got[2:])


def test_keys_may_be_wider_than_queries() -> None:
    """They count as rounded, and their gradients come back unrounded."""
    plan, (q, k, v, do, dlse) = tiles(forest(13, 0), (8, 8)), inputs(13, 13, 2, 1, 8, 0)
    q = q.astype(jnp.bfloat16)
    rounded = [x.astype(jnp.bfloat16) for x in (k, v)]
    wide = results(FAST, q, k, v, do, dlse, plan)
    narrow = results(FAST, q, *rounded, do, dlse, plan)
    for a, b in zip(wide[:3], narrow[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(wide[3:], narrow[3:], strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a.astype(jnp.bfloat16), b)


def test_what_a_tpu_cannot_do_is_named() -> None:
    def refused(match: str, *, tile=TILE, dtype="float32", heads=2, d=64, error=None) -> None:
        plan = tiles(forest(16, 0), tile)
        q, k, v, *_ = inputs(16, 16, heads, 1, d, 0)
        with pytest.raises(error or NotImplementedError, match=match):
            jax.eval_shape(lambda: attention(*(x.astype(dtype) for x in (q, k, v)), plan, scale=1))

    refused("float16; attention=xla", dtype="float16")
    with jax.enable_x64(True):
        refused("float64; attention=xla", dtype="float64")
    refused(r"tile=\(64, 128\) .* multiple of 128", tile=(64, 128))
    refused("smaller tiles", tile=(4096, 4096))
    long = tree_plan(np.full(8, 8), tile=TILE, layout="tiles", bucket=lambda size: 1 << 18)
    q, k, v, *_ = inputs(8, 8, 1, 1, 32, 0)
    with pytest.raises(NotImplementedError, match="larger tiles"):
        attention(q, k, v, long, scale=1)
    with pytest.raises(ValueError, match="not in steps"):
        attention(q, k, v, tree_plan(np.full(8, 8), bucket=fixed), scale=1)


@pytest.mark.parametrize(
    ("topology", "dtype", "group", "d", "tile", "window", "softcap"),
    [
        ("v5e:2x2", "bfloat16", 2, 128, TILE, None, None),
        ("v5p:2x2x1", "float32", 1, 64, (256, 512), None, None),
        ("v6e:2x2", "bfloat16", 1, 128, TILE, 4096, 30.0),
        ("tpu7x:2x2x1", "bfloat16", 4, 128, (256, 256), None, None),
    ],
)
def test_compiles_for_tpus(monkeypatch, topology, dtype, group, d, tile, window, softcap) -> None:
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    # Nothing is asked of a cloud, and other processes may compile at the same time.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    n, kv = 2048, 2
    exit_ = np.full(n, n, np.int32)
    plan = tree_plan(exit_, np.arange(n), window, tile=tile, layout="tiles", bucket=fixed)
    q, k, v, do, dlse = jax.eval_shape(partial(inputs, n, n, kv * group, kv, d, 0, dtype))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
        ),
        (q, k, v, do, dlse, plan),
    )
    lowered = (
        jax.jit(traced, static_argnames=STATIC).trace(attention, *abstract, softcap=softcap).lower()
    )
    compiled = lowered.compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    for name in ("forward", "dq", "dkv"):
        assert f"tree_attention_{name}" in text
    # Some copies of the inputs in another layout, and nothing of the size of the mask.
    assert 0 <= compiled.memory_analysis().temp_size_in_bytes < 4 * n * n


def test_kernels_say_what_their_lists_cost() -> None:
    """Products of all listed pairs; what belongs to a line of tiles is moved once a line."""
    n, heads, kv, d, side = 96, 4, 2, 16, 32
    plan = tree_plan(np.full(n, n), tile=side, layout="tiles", bucket=lambda size: size)
    pairs, lines = len(plan.lists.rows), n // side
    assert pairs == lines * (lines + 1) // 2
    abstract = jax.eval_shape(partial(inputs, n, n, heads, kv, d, 0, "bfloat16"))
    jaxpr = jax.make_jaxpr(partial(traced, FAST, plan=plan))(*abstract)
    found = {e.params["name"]: e.params["cost_estimate"] for e in kernels(jaxpr.jaxpr)}
    for name, products in (("forward", 2), ("dq", 3), ("dkv", 4)):
        cost = found[f"tree_attention_{name}"]
        assert cost.flops == 2 * products * heads * d * side * side * pairs
    # Blocks fill registers of 8 x 128; of a pair: k and v of 32 keys, and their ids.
    of_queries = 2 * (2 * d * 128) * 2 + 8 * 128 * 4 + 8 * 128 * 4  # q, o; lse; ids
    of_keys = side * 128 * 2 + d * 128 * 2 + 8 * 128 * 4
    assert found["tree_attention_forward"].bytes_accessed == kv * (
        lines * of_queries + pairs * of_keys
    )


def kernels(jaxpr) -> list:
    inner = [x for eqn in jaxpr.eqns for x in jax.extend.core.jaxprs_in_params(eqn.params)]
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    return found + [eqn for x in inner for eqn in kernels(getattr(x, "jaxpr", x))]
