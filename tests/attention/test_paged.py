"""Attention over pages is attention over the sequences that they hold."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from forge_jax.attention import paged
from forge_jax.attention.kernels import mosaic_tpu_paged
from forge_jax.attention.paged import gathered_attention, merge, paged_attention

SCALE = 0.3
# An interpreted kernel is compiled once and runs for milliseconds.
KERNEL = jax.jit(
    partial(mosaic_tpu_paged.attention, scale=SCALE, interpret=True),
    compiler_options={"xla_backend_optimization_level": 0},
)
IMPLEMENTATIONS = {"xla": jax.jit(partial(paged_attention, scale=SCALE)), "pallas": KERNEL}


def inputs(
    seed: int, rows: int, queries: int, group: int, kv: int, dim: int, page: int, columns: int
) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    pages = rows * columns + 3
    q = rng.normal(size=(rows, queries, kv * group, dim))
    keys, values = rng.normal(size=(2, pages, kv, page, dim))
    table = rng.permutation(pages)[: rows * columns].reshape(rows, columns).astype(np.int32)
    last = rng.integers(-1, columns * page, (rows, queries)).astype(np.int32)
    last[0, 0] = -1
    return q, keys, values, table, last


def oracle(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Query by query, head by head, in float64."""
    rows, queries, heads, _ = q.shape
    group = heads // keys.shape[1]
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(rows):
        for h in range(heads):
            k, v = (np.concatenate(list(x[table[b], h // group])) for x in (keys, values))
            for t in range(queries):
                n = last[b, t] + 1
                if n:
                    scores = k[:n] @ q[b, t, h] * SCALE
                    weights = np.exp(scores - scores.max())
                    o[b, t, h] = weights @ v[:n] / weights.sum()
                    lse[b, t, h] = scores.max() + np.log(weights.sum())
    return o, lse


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "queries", "group", "kv", "dim", "page", "columns"),
    [
        (3, 1, 2, 2, 16, 8, 5),
        (2, 4, 1, 3, 8, 8, 3),
        (1, 24, 4, 1, 16, 16, 40),
        (2, 1, 1, 1, 8, 8, 1),
        (2, 1, 2, 1, 8, 16, 70),  # more pages than buffers hold
    ],
)
def test_every_query_sees_what_it_may(
    implementation, rows, queries, group, kv, dim, page, columns
) -> None:
    given = inputs(0, rows, queries, group, kv, dim, page, columns)
    narrow = [np.asarray(x, np.float32) if x.dtype == np.float64 else x for x in given]
    o, lse = IMPLEMENTATIONS[implementation](*narrow)
    wanted_o, wanted_lse = oracle(*given)
    np.testing.assert_allclose(o, wanted_o, atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)


def test_float64_stays() -> None:
    with jax.enable_x64(True):
        given = inputs(1, 2, 2, 2, 2, 8, 8, 3)
        o, lse = paged_attention(*given, scale=SCALE)
    wanted_o, wanted_lse = oracle(*given)
    np.testing.assert_allclose(o, wanted_o, atol=1e-14)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-14)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_pages_have_float32_sums(implementation: str) -> None:
    q, keys, values, table, last = inputs(2, 2, 2, 2, 2, 16, 16, 20)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, keys, values)]
    o, lse = IMPLEMENTATIONS[implementation](*rounded, table, last)
    assert o.dtype == lse.dtype == jnp.float32
    wanted_o, wanted_lse = oracle(*(np.asarray(x, np.float64) for x in rounded), table, last)
    np.testing.assert_allclose(o, wanted_o, atol=1e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_seen_does_not_matter(implementation: str) -> None:
    """Not a bit: other pages, other places of a page, other rows."""
    q, keys, values, table, last = (
        np.asarray(x, np.float32) if x.dtype == np.float64 else x
        for x in inputs(3, 2, 1, 2, 2, 8, 8, 4)
    )
    last = np.array([[9], [20]], np.int32)
    before = IMPLEMENTATIONS[implementation](q, keys, values, table, last)
    for page in set(range(len(keys))) - set(table[0, :2].tolist()) - set(table[1, :3].tolist()):
        keys[page], values[page] = 7, 7
    for row, end in ((0, 10), (1, 21)):
        page, place = table[row, end // 8], end % 8
        keys[page, :, place:], values[page, :, place:] = -9, 9
    after = IMPLEMENTATIONS[implementation](q, keys, values, table, last)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_a_context_merge(implementation: str) -> None:
    """A bundle's rows over pages they share, then each over its own, as over all of them."""
    q, keys, values, table, last = (
        np.asarray(x, np.float32) if x.dtype == np.float64 else x
        for x in inputs(4, 4, 1, 2, 2, 8, 8, 5)
    )
    table[:, :2] = table[0, :2]
    last = np.array([[16], [20], [39], [25]], np.int32)
    attend = IMPLEMENTATIONS[implementation]
    together = attend(
        q.reshape(1, 4, *q.shape[2:]), keys, values, table[:1, :2], np.full((1, 4), 15, np.int32)
    )
    shared = tuple(x.reshape(4, 1, *x.shape[2:]) for x in together)
    own = attend(q, keys, values, table[:, 2:], last - 16)
    whole, _ = attend(q, keys, values, table, last)
    np.testing.assert_allclose(merge(shared, own), whole, atol=1e-6)


def test_merging_nothing_with_nothing_is_nothing() -> None:
    nothing = (jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf))
    assert not np.asarray(merge(nothing, nothing)).any()


def test_views_are_pages_side_by_side() -> None:
    q, keys, values, table, last = inputs(5, 2, 3, 2, 2, 8, 8, 3)
    q, keys, values = (jnp.asarray(x, jnp.float32) for x in (q, keys, values))
    k, v = paged.view(keys, table), paged.view(values, table)
    assert k.shape == (2, 2, 24, 8)
    for x, y in zip(
        gathered_attention(q, k, v, last, scale=SCALE),
        paged_attention(q, keys, values, table, last, scale=SCALE),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_the_kernel_refuses_what_it_cannot_read() -> None:
    q, keys, values, table, last = inputs(6, 1, 1, 1, 1, 8, 4, 2)
    with pytest.raises(NotImplementedError, match="page=4"):
        KERNEL(*(np.asarray(x, np.float32) for x in (q, keys, values)), table, last)
    with pytest.raises(NotImplementedError, match="float16"):
        KERNEL(*(np.asarray(x, np.float16) for x in (q, keys, values)), table, last)

    def refused(match: str, rows: int, queries: int, columns: int, dim: int) -> None:
        shapes = ((rows, queries, 8, dim), *[(9, 1, 16, dim)] * 2, (rows, columns), (rows, queries))
        given = [jax.ShapeDtypeStruct(s, "f4" if len(s) == 4 else "i4") for s in shapes]
        with pytest.raises(NotImplementedError, match=match):
            jax.eval_shape(partial(mosaic_tpu_paged.attention, scale=1), *given)

    refused("use larger pages", 64, 1, 8192, 128)
    refused("use fewer queries", 1, 4096, 8, 128)


def test_what_does_not_belong_together_is_refused() -> None:
    q, keys, values, table, last = inputs(7, 2, 3, 2, 2, 8, 8, 2)
    wrong = (
        (q, keys, values[:, :1], table, last),
        (q[..., :4], keys, values, table, last),
        (q[:, :, :3], keys, values, table, last),
        (q, keys, values, table[:1], last),
        (q, keys, values, table, last[:, :1]),
    )
    for given in wrong:
        with pytest.raises(ValueError, match=r"q\(2, 3"):
            paged_attention(*given, scale=SCALE)
    with pytest.raises(ValueError, match="implementation='mosaic'"):
        paged_attention(q, keys, values, table, last, scale=SCALE, implementation="mosaic")


@pytest.mark.parametrize(
    ("topology", "dtype", "rows", "queries", "group", "dim", "page"),
    [
        ("v5e:2x2", "bfloat16", 8, 1, 4, 128, 64),
        ("v5p:2x2x1", "float32", 4, 8, 2, 128, 16),
        ("v6e:2x2", "bfloat16", 1, 128, 8, 128, 16),
        ("tpu7x:2x2x1", "bfloat16", 16, 3, 1, 128, 128),
    ],
)
def test_it_compiles_for_tpus(
    monkeypatch, topology, dtype, rows, queries, group, dim, page
) -> None:
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    # Nothing is asked of a cloud, and other processes may compile at the same time.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    where = jax.sharding.SingleDeviceSharding(device)
    kv, pages, columns = 2, 512, 64
    floats = [(rows, queries, kv * group, dim), *[(pages, kv, page, dim)] * 2]
    integers = [(rows, columns), (rows, queries)]
    abstract = [jax.ShapeDtypeStruct(s, dtype, sharding=where) for s in floats]
    abstract += [jax.ShapeDtypeStruct(s, jnp.int32, sharding=where) for s in integers]
    attend = jax.jit(partial(mosaic_tpu_paged.attention, scale=1 / math.sqrt(dim)))
    compiled = attend.lower(*abstract).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    # Pages are read where they are: nothing of the size of a gathered context is made.
    gathered = 2 * rows * columns * page * kv * dim * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < gathered / 4
