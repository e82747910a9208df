"""A digest of weights, by which pages of two engines are known to be of the same model.

Parameters flow in, 32 bytes flow out. Invariant: equal names, shapes, dtypes and bits give equal
digests, however arrays are cut over devices: sums of integers modulo 2**32 do not depend on
their order.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

LANES = 4  # independent sums of 32 bits for each array


def fingerprint(params: Any) -> bytes:
    """The digest of a tree of arrays; runs one small program over each, where it lies.

    It tells apart weights that differ by chance or training; it is no defence against weights
    made to collide.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    sums = jax.device_get([_sums(leaf) for _, leaf in leaves])
    found = hashlib.sha256()
    for (path, leaf), lanes in zip(leaves, sums, strict=True):
        found.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype.name} ".encode())
        found.update(np.asarray(lanes, "<u4").tobytes())
    return found.digest()


@jax.jit
def _sums(x: Array) -> UInt32[Array, " lanes"]:
    """Sums of all elements' bits, each stirred with its place."""
    if x.ndim == 0:
        x = x[None]
    bits = _bits(x)
    place = jnp.zeros((1,) * bits.ndim, jnp.uint32)
    for axis in range(bits.ndim):
        place = _stir(
            place * np.uint32(31) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        )
    lanes = []
    for lane in range(LANES):
        seed = np.uint32((0x9E3779B9 * (lane + 1)) & 0xFFFFFFFF)
        lanes.append(jnp.sum(_stir(_stir(bits ^ seed) ^ (place + seed)), dtype=jnp.uint32))
    return jnp.stack(lanes)


def _bits(x: Array) -> Array:
    """u32[..., words]: what the elements are in memory."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word)
    return bits.astype(jnp.uint32)


def _stir(x: Array) -> Array:
    """A permutation of 32-bit integers that mixes all bits (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
