"""Digests of weights: the same on any mesh, another for any other bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from forge_jax.rollout.tiers.fingerprint import fingerprint

RNG = np.random.default_rng(0)
TREE = {
    "embed": RNG.normal(size=(8, 4)).astype(np.float32),
    "layers": {
        "wide": jnp.asarray(RNG.normal(size=(2, 4, 8)), jnp.bfloat16),
        "norm": np.ones((2, 4), np.float32),
        "count": np.int32(3),
    },
}


def test_a_mesh_changes_nothing() -> None:
    alone = fingerprint(TREE)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("a", "b"), (kind, kind))
        for spec in (jax.P("a"), jax.P(None, "b"), jax.P("a", "b"), jax.P(("a",), None)):
            there = jax.NamedSharding(mesh, spec)
            whole = jax.NamedSharding(mesh, jax.P())

            def put(x: np.ndarray, there=there, whole=whole) -> jax.Array:
                return jax.device_put(x, there if np.ndim(x) > 1 else whole)

            assert fingerprint(jax.tree.map(put, TREE)) == alone


def test_every_bit_name_shape_and_dtype_counts() -> None:
    def changed(path: str, make) -> bytes:
        return fingerprint({**TREE, path: make(TREE[path])})

    def flipped(bit: int, place: tuple[int, int]):
        def make(x: np.ndarray) -> np.ndarray:
            bits = x.copy().view(np.uint32)
            bits[place] ^= np.uint32(1 << bit)
            return bits.view(np.float32)

        return make

    digests = [fingerprint(TREE)]
    digests += [changed("embed", flipped(bit, (1, 2))) for bit in range(32)]
    digests += [changed("embed", flipped(0, (i, j))) for i in range(8) for j in range(4)]
    digests.append(changed("embed", lambda x: x[::-1].copy()))
    digests.append(changed("embed", lambda x: x[:, ::-1].copy()))
    digests.append(changed("embed", lambda x: x.T.copy()))
    digests.append(changed("embed", lambda x: x.reshape(4, 8)))
    digests.append(changed("embed", lambda x: x.view(np.int32)))
    digests.append(fingerprint({**TREE, "other": TREE["embed"]}))
    digests.append(fingerprint({"embod": TREE["embed"], "layers": TREE["layers"]}))
    assert len(set(digests)) == len(digests) - 1  # one bit was flipped at one place twice


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_two_elements_that_change_places_are_seen(dtype: str) -> None:
    x = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    y = x.copy()
    y[0, 1], y[2, 3] = x[2, 3], x[0, 1]
    assert fingerprint([x]) == fingerprint([x.copy()]) != fingerprint([y])
