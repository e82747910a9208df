"""What a plan counts: products and collectives by hand, loops by their rounds, traffic by HLO."""

import inspect
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from experiments.planning import counting, hlo, measure, partitioned, traffic
from experiments.planning.counting import Known, Sent, Work, count
from experiments.planning.programs import Program
from experiments.planning.topology import parse as topology

X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
W = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
MESH = {"a": 2, "b": 4}
ALONE = Known(mesh=MESH)
ONE = 2 * 8 * 16 * 16  # FLOPs of X @ W


def counted(f, *args, known: Known = ALONE) -> Work:
    return count(jax.make_jaxpr(f)(*args), known)


def test_a_plain_program_has_the_compilers_own_figure() -> None:
    def f(x, w):
        return (x @ w) @ w

    wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (X, W)]  # a CPU casts the others
    said = jax.jit(f).lower(*wide).compile().cost_analysis()["flops"]
    assert counted(f, *wide).flops == said == 2 * ONE
    assert counted(lambda x, w: (f(x, w), x @ w)[1], X, W).flops == ONE, "of what is read"


def test_loops_branches_and_remat_count_as_often_as_they_run() -> None:
    def looped(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    def nested(x, w):
        return jax.lax.scan(lambda x, _: (looped(x, w), None), x, length=3)[0]

    assert counted(looped, X, W).flops == 5 * ONE
    assert counted(nested, X, W).flops == 15 * ONE

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x, x)

    assert counted(branch, X, W).flops == 2 * ONE
    assert counted(branch, X, W, known=Known(mesh=MESH, taken=0.25)).flops == ONE / 2

    def loss(w, x, again):
        layer = jax.checkpoint(lambda x: jnp.sin(x @ w)) if again else lambda x: jnp.sin(x @ w)
        return jnp.sum(layer(x).astype(jnp.float32))

    for again, times in ((False, 2), (True, 3)):
        both = jax.value_and_grad(partial(loss, again=again))
        assert counted(both, W, X).flops == times * ONE


def test_a_loop_of_unknown_length_is_refused_where_it_matters() -> None:
    def around(x, w, n, body):
        return jax.lax.fori_loop(0, n, body, x)

    n = jax.ShapeDtypeStruct((), jnp.int32)
    assert counted(lambda x, n: around(x, None, n, lambda _, x: x + 1), X, n) == Work()
    with pytest.raises(NotImplementedError, match="unknown length"):
        counted(lambda x, w, n: around(x, w, n, lambda _, x: x @ w), X, W, n)


def test_float32_products_are_several_of_bfloat16() -> None:
    wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (X, W)]
    for precision, passes in ((None, 1), ("high", 3), ("highest", 6)):
        work = counted(partial(jnp.matmul, precision=precision), *wide)
        assert (work.flops, work.passes) == (ONE, passes * ONE)
    assert counted(partial(jnp.matmul, precision="highest"), X, W).passes == ONE


def test_ragged_products_count_each_row_once() -> None:
    rows, sizes = jax.ShapeDtypeStruct((40, 16), jnp.bfloat16), jax.ShapeDtypeStruct((4,), "int32")
    matrices = jax.ShapeDtypeStruct((4, 16, 8), jnp.bfloat16)
    each = 2 * 40 * 16 * 8
    assert counted(jax.lax.ragged_dot, rows, matrices, sizes).flops == each

    def loss(rows, matrices, sizes):
        return jnp.sum(jax.lax.ragged_dot(rows, matrices, sizes).astype(jnp.float32))

    assert counted(jax.grad(loss, argnums=(0, 1)), rows, matrices, sizes).flops == 2 * each


def test_the_branch_for_a_tpu_is_taken() -> None:
    def f(x, w):
        plain, tpu = (lambda x, w: x @ w), (lambda x, w: x @ w @ w)
        return jax.lax.platform_dependent(x, w, cpu=plain, default=tpu)

    assert counted(f, X, W, known=Known(mesh=MESH, taken=0.1)).flops == 2 * ONE


def ranked(f, shape: tuple[int, ...] = (8, 16)) -> Work:
    """The work of a rank in a mesh of 2 x 4."""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    where = jax.sharding.NamedSharding(mesh, jax.P(("a", "b")))
    x = jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), jnp.float32, sharding=where)
    mapped = jax.shard_map(f, mesh=mesh, out_specs=jax.P(), check_vma=False)
    return count(jax.jit(mapped).trace(x).jaxpr, ALONE)


def test_collectives_send_what_a_ring_does() -> None:
    size = 8 * 16 * 4  # bytes of a rank's array
    cases = {
        "psum": (lambda x: jax.lax.psum(x, "b"), ("b",), 2 * size * 3 / 4),
        "all_gather": (
            lambda x: jax.lax.all_gather(x, ("b", "a"), tiled=True), ("a", "b"), 7 * size,
        ),
        "reduce_scatter": (
            lambda x: jax.lax.psum_scatter(x, "a", tiled=True), ("a",), size / 2,
        ),
        "ppermute": (lambda x: jax.lax.ppermute(x, "a", [(0, 1), (1, 0)]), ("a",), size),
    }  # fmt: skip
    for kind, (f, axes, each) in cases.items():
        assert ranked(f).sent == {Sent(kind, axes, False): each}

    def looped(x):
        with jax.named_scope("weights"):
            return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "a"), None), x, length=3)[0]

    assert ranked(looped).sent == {Sent("psum", ("a",), True): 3 * size}


def test_products_are_a_devices_inside_and_outside_of_a_map() -> None:
    assert ranked(lambda x: x @ x.T).flops == 2 * 8 * 8 * 16
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    x, w = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for x, spec in ((X, jax.P("a")), (W, jax.P(None, "b")))
    )
    assert count(jax.jit(jnp.matmul).trace(x, w).jaxpr, ALONE).flops == ONE / 8


@pytest.mark.parametrize("changed", [hlo, traffic, partitioned, counting, measure])
def test_findings_are_found_anew_where_what_reads_them_changed(
    changed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.metadata, "version", lambda package: "1")
    program = Program(name="one", traced=None, runs=1, beside={}, names={})
    lowered = jax.jit(lambda x: x).lower(X)
    source = inspect.getsource

    def name() -> str:
        return measure._name(program, lowered, topology("v5e:2x2"))

    before = name()
    assert before == name()
    monkeypatch.setattr(inspect, "getsource", lambda one: source(one) + "#" * (one is changed))
    assert before != name()
