"""The Hopper kernels equal the dense oracle, values and each gradient, and compile for sm_90a.

Lowering needs nothing. Compiling needs no card, only the compiler: the wheels of a CUDA
plugin of jax and of `nvidia-cuda-nvcc`. Interpreted on the CPU, lists, rings, barriers and
masks are those of the card, and races between warpgroups are found; only products are not
WGMMA. The last test runs the kernels, where there is a card.
"""

import glob
import importlib.util
import os
import shutil
import sysconfig
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from random_forests import depths, fixed, forest

from forge_jax.attention.kernels.mosaic_gpu import TILE, attention
from forge_jax.attention.plan import TilePlan, build_plan, tree_plan, window_start
from forge_jax.attention.reference import reference_attention

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10 has the interpreter, but does not name it in public
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

NAMES = ("o", "lse", "dq", "dk", "dv")
WORST = {"float16": 3e-3, "bfloat16": 1e-2}  # of a result, in relative L2
INTERPRETED = partial(attention, interpret=InterpretGPUParams(detect_races=True))
ON_A_GPU = jax.default_backend() == "gpu"
HOPPER = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  clock_rate_ghz: 1.98
}
"""
CASES = pytest.mark.parametrize(
    ("dtype", "heads", "kv", "d", "tile", "window", "softcap"),
    [
        ("bfloat16", 8, 1, 128, TILE, None, None),
        ("bfloat16", 4, 1, 64, TILE, 300, None),
        ("float16", 2, 2, 128, TILE, None, 20.0),
        ("bfloat16", 2, 2, 256, TILE, 77, 30.0),
        ("float16", 4, 2, 32, TILE, None, None),
        ("bfloat16", 2, 1, 128, (64, 64), None, None),
        ("bfloat16", 2, 1, 64, (128, 64), 10, None),
        ("bfloat16", 2, 1, 256, (64, 128), None, None),
        ("bfloat16", 1, 1, 80, TILE, None, None),
        ("bfloat16", 1, 1, 192, TILE, None, None),
    ],
)


def tiles(exit_: np.ndarray, tile: tuple[int, int] = TILE, window: int | None = None) -> TilePlan:
    depth = None if window is None else depths(exit_)
    return tree_plan(exit_, depth, window, tile=tile, layout="tiles", bucket=fixed)


def oracle(q, k, v, plan: TilePlan, *, scale: float, softcap: float | None = None) -> tuple:
    q_id, q_from = (jnp.asarray(x[: len(q)]) for x in (plan.q_id, plan.q_from))
    k_id, k_exit = (jnp.asarray(x[: len(k)]) for x in (plan.k_id, plan.k_exit))
    q, k, v = (x.astype(q.dtype).astype(jnp.float32) for x in (q, k, v))
    return reference_attention(q, k, v, q_id, k_id, k_exit, scale, q_from=q_from, softcap=softcap)


def inputs(t: int, s: int, h: int, k: int, d: int, seed: int, dtype: str = "bfloat16") -> tuple:
    """(q, k, v) and a cotangent of each result."""
    rng = np.random.default_rng(seed)
    shapes = ((t, h, d), (s, k, d), (s, k, d), (t, h, d))
    q, k, v, do = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, do, jnp.asarray(rng.normal(size=(h, t)), jnp.float32)


@partial(jax.jit, static_argnames=("attend", "scale", "softcap"))
def results(attend, q, k, v, do, dlse, plan, scale=0.125, softcap=None) -> tuple:
    """(o, lse, dq, dk, dv)."""
    attend = partial(attend, plan=plan, scale=scale, softcap=softcap)
    (o, lse), pull = jax.vjp(attend, q, k, v)
    return o, lse, *pull((do.astype(o.dtype), jnp.where(jnp.isfinite(lse), dlse, 0)))


def assert_equal(got: tuple, want: tuple, worst: float) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=name)
        gap = np.linalg.norm(a[finite] - b[finite])
        assert gap <= worst * (1e-3 + np.linalg.norm(b[finite])), f"{name}: {gap}"


def given(dtype, heads, kv, d, tile, window, n: int) -> tuple:
    """Inputs of `results`: random ones, and the plan of a random forest."""
    return *inputs(n, n, heads, kv, d, d, dtype), tiles(forest(n, seed=d), tile, window)


@CASES
def test_lowers_for_cuda(dtype, heads, kv, d, tile, window, softcap) -> None:
    case = given(dtype, heads, kv, d, tile, window, n=200)
    lowered = results.trace(attention, *case, softcap=softcap).lower(lowering_platforms=("cuda",))
    # Forward, dq, and dkv: in one kernel while its two sums fit the registers.
    assert lowered.as_text().count("@mosaic_gpu") == (4 if d > 128 else 3)


@CASES
def test_compiles_for_hopper(monkeypatch, dtype, heads, kv, d, tile, window, softcap) -> None:
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        pytest.skip("no CUDA plugin of jax is installed")
    wheels = glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/*/bin")
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], *wheels]))
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas, the assembler for NVIDIA cards, is not installed")
    topology = topologies.get_topology_desc(
        "H100", platform="cuda", target_config=HOPPER, topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    case = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        given(dtype, heads, kv, d, tile, window, n=2048),
    )
    compiled = results.trace(attention, *case, softcap=softcap).lower().compile()
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == (4 if d > 128 else 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "queries", "keys", "d", "tile", "window", "softcap"),
    [
        ("bfloat16", 2, 64, 320, 20, (64, 64), 230, 3.0),  # more steps than a ring has slots
        ("float16", 1, 130, 137, 64, TILE, None, None),  # two computing warpgroups
    ],
)
def test_equals_the_oracle(dtype, heads, queries, keys, d, tile, window, softcap) -> None:
    first, ids = keys - queries, np.arange(keys, dtype=np.int32)
    exit_ = np.append(np.full(first, keys, np.int32), first + forest(queries, seed=d))  # a trunk
    horizon = window_start(depths(exit_), window)[first:] if window else None
    plan = build_plan(ids[first:], ids, exit_, horizon, tile=tile, layout="tiles", bucket=fixed)
    case = (*inputs(queries, keys, heads, 1, d, 0, dtype), plan)
    got = results(INTERPRETED, *case, softcap=softcap)
    assert got[0].dtype == got[2].dtype == got[3].dtype == jnp.dtype(dtype)
    assert got[1].dtype == jnp.float32
    assert_equal(got, results(oracle, *case, softcap=softcap), WORST[dtype])


def odd_case() -> tuple:
    """Queries that see nothing, keys in any order, float32 keys; ids as `results` takes them."""
    exit_ = forest(60, 5)
    exit_[:7] = np.arange(7)  # nobody sees the first seven
    keys = np.random.default_rng(0).permutation(39).astype(np.int32)
    plan = build_plan(
        np.arange(2, 39), keys, exit_[keys], tile=(64, 64), layout="tiles", bucket=fixed
    )
    q, k, v, do, dlse = inputs(37, 39, 1, 1, 32, 0, "float32")
    return q.astype(jnp.bfloat16), k, v, do, dlse, plan


@pytest.mark.slow
def test_what_is_not_seen_does_not_reach() -> None:
    """Nor do queries that see nothing have gradients; those of float32 keys are float32."""
    *case, plan = odd_case()
    clean = results(INTERPRETED, *case, plan)
    assert clean[2].dtype == jnp.bfloat16
    assert clean[3].dtype == clean[4].dtype == jnp.float32
    assert_equal(clean, results(oracle, *case, plan), WORST["bfloat16"])
    assert np.isneginf(clean[1][:, :5]).all()
    for x in (clean[0], clean[2]):
        assert not np.asarray(x[:5], np.float32).any()

    # A leaf in the middle: what sees it is itself, what it sees are its ancestors.
    mask = np.asarray(plan.k_id[:39])[None] <= np.asarray(plan.q_id[:37])[:, None]
    mask &= np.asarray(plan.q_id[:37])[:, None] < np.asarray(plan.k_exit[:39])[None]
    key = int(np.flatnonzero(mask.sum(0) == 1)[0])
    query = int(np.flatnonzero(mask[:, key])[0])
    q, k, v, do, dlse = case
    spoilt = (
        q.at[query].set(jnp.nan), k.at[key].set(jnp.inf), v.at[key].set(jnp.nan),
        do.at[query].set(3e38), dlse.at[:, query].set(jnp.nan),
    )  # fmt: skip
    other = results(INTERPRETED, *spoilt, plan)
    for name, a, b in zip(NAMES, clean, other, strict=True):
        a, b = (np.asarray(x.T if name == "lse" else x, np.float32) for x in (a, b))
        touched = mask[query] if name in ("dk", "dv") else np.arange(37) == query
        np.testing.assert_array_equal(a[~touched], b[~touched], err_msg=name)
        assert np.isnan(b[touched]).all(), name


def test_other_inputs_are_refused_by_name() -> None:
    def refused(match: str, dtype="bfloat16", keys=None, d=64, plan=None) -> None:
        q, k, v, *_ = inputs(16, 16, 2, 1, d, 0, dtype)
        k, v = (x.astype(keys or dtype) for x in (k, v))
        with pytest.raises(NotImplementedError, match=match):
            attention(q, k, v, plan or tiles(forest(16, 0)), scale=1)

    refused("float32; attention=xla", dtype="float32")
    refused("float16 keys", keys="float16")
    refused("head dims up to 256, not 288; attention=xla", d=288)
    refused(r"Tiles of \(32, 64\)", plan=tiles(forest(16, 0), (32, 64)))
    refused("Steps", plan=tree_plan(forest(16, 0), bucket=fixed))


@pytest.mark.parametrize(
    ("kind", "capability"), [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA B200", "10.0")]
)
def test_other_cards_are_refused_by_name(monkeypatch, kind: str, capability: str) -> None:
    card = SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [card])
    q, k, v, *_ = inputs(16, 16, 2, 1, 64, 0)
    with pytest.raises(NotImplementedError, match=f"{kind} .*{capability}.*attention=xla"):
        attention(q, k, v, tiles(forest(16, 0)), scale=1)


@pytest.mark.skipif(not ON_A_GPU, reason="needs a Hopper card, and JAX_PLATFORMS=cuda")
@CASES
def test_equals_the_oracle_on_the_card(dtype, heads, kv, d, tile, window, softcap) -> None:
    with jax.default_matmul_precision("highest"):
        for n in (0, 1, 1000, 1536):
            case = given(dtype, heads, kv, d, tile, window, n)
            got = results(attention, *case, softcap=softcap)
            assert_equal(got, results(oracle, *case, softcap=softcap), WORST[dtype])
            for a, b in zip(got, results(attention, *case, softcap=softcap), strict=True):
                np.testing.assert_array_equal(a, b)
        *case, plan = odd_case()
        assert_equal(results(attention, *case, plan), results(oracle, *case, plan), 1e-2)
