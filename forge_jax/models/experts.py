"""What a mixture of experts computes once its tokens are routed: each expert on its tokens.

Hidden states, each token's experts and their weights flow in; weighted sums of the experts'
outputs flow out. No token is dropped, and no row is computed that no token asked for, but for
the padding of blocks.

Pairs of a token and one of its experts are sorted by expert. "blocks", for CPUs, goes through
the experts one by one, each in blocks of its rows, every block a plain matrix product; "ragged"
multiplies chunks of all rows by `grouped_dot`, for which accelerators have kernels. (A CPU has
none: there it multiplies all rows by all experts.) The backward pass gathers and multiplies
again what it needs, so nothing as large as the gathered rows is ever kept.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.models.grouped import grouped_dot
from forge_jax.models.layers import accumulator

IMPLEMENTATIONS = ("auto", "blocks", "ragged")
BLOCK = 128  # rows of a block, at most
SMALLEST_BLOCK = 16
ROWS = 128  # to a multiple of which chunks are padded, for kernels
CHUNK = 65536  # rows of a chunk, at most: what "ragged" gathers at once


class Experts(NamedTuple):
    """Gated feed-forward layers, one for each expert."""

    gate: Float[Array, "X E F"]
    up: Float[Array, "X E F"]
    down: Float[Array, "X F E"]


def mixture(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T k"],
    weight: Float[Array, "T k"],
    layer: Experts,
    *,
    implementation: str = "auto",
    chunk: int = CHUNK,
) -> Float[Array, "T E"]:
    """For each token the sum of ``weight * expert(x)`` over the experts it chose.

    An expert not in [0, X) is none of these, and adds nothing. "auto" is "blocks" where it is
    compiled for a CPU, else "ragged", which gathers at most `chunk` rows at once. Sums are made
    in at least float32. Raises ValueError for an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {', '.join(IMPLEMENTATIONS)}")
    if not chosen.size:
        return jnp.zeros_like(x)
    sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(len(layer.gate))[None], axis=0)
    inside = (chosen >= 0) & (chosen < len(layer.gate))
    order = jnp.argsort(jnp.where(inside, chosen, len(layer.gate)).reshape(-1), stable=True)
    return _mixture(x, weight, layer, order, sizes, implementation, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _mixture(x, weight, layer, order, sizes, implementation, chunk):
    forward: Mapping[str, Any] = {"blocks": _blocks, "ragged": partial(_ragged, chunk=chunk)}
    return _by_platform(implementation, forward, x, weight, layer, order, sizes)


def _forward(x, weight, layer, order, sizes, implementation, chunk):
    y = _mixture(x, weight, layer, order, sizes, implementation, chunk)
    return y, (x, weight, layer, order, sizes)


def _backward(implementation, chunk, saved, dy):
    backward: Mapping[str, Any] = {
        "blocks": _blocks_backward,
        "ragged": partial(_ragged_backward, chunk=chunk),
    }
    return *_by_platform(implementation, backward, *saved, dy), None, None


_mixture.defvjp(_forward, _backward)


def _by_platform(implementation: str, each: Mapping[str, Callable[..., Any]], *args: Any) -> Any:
    if implementation == "auto":
        return jax.lax.platform_dependent(*args, cpu=each["blocks"], default=each["ragged"])
    return each[implementation](*args)


def _rows(
    dot: Callable[[Array, Array], Array], rows: Array, scale: Array, layer: Experts
) -> Float[Array, "R E"]:
    """``scale * expert(row)``; scaled before the last product, whose result the backward pass
    then has no use for."""
    gated = jax.nn.silu(dot(rows, layer.gate)) * dot(rows, layer.up)
    return dot((gated * scale[:, None]).astype(rows.dtype), layer.down)


def _block(rows: int, experts: int) -> int:
    """Rows of a block: a power of two, such that on average an expert has two or more."""
    share = max(1, rows // (2 * experts))
    return min(BLOCK, max(SMALLEST_BLOCK, 1 << (share.bit_length() - 1)))


class _Blocks:
    """The pairs of one expert, block by block."""

    def __init__(self, order: Array, sizes: Array, per_token: int):
        self.rows = _block(len(order), len(sizes))
        self.order = jnp.pad(order, (0, self.rows))  # a last block may look past the end
        self.per_token = per_token
        self.stop = jnp.cumsum(sizes)
        self.start = self.stop - sizes

    def count(self, start: Array, stop: Array) -> Array:
        return (stop - start + self.rows - 1) // self.rows

    def pairs(self, start: Array, stop: Array, i: Array) -> tuple[Array, Array, Array]:
        """Pairs, their tokens, and which are in block i of an expert's [start, stop)."""
        at = start + i * self.rows
        pair = jax.lax.dynamic_slice(self.order, (at,), (self.rows,))
        return pair, pair // self.per_token, at + jnp.arange(self.rows) < stop


def _blocks(x: Array, weight: Array, layer: Experts, order: Array, sizes: Array) -> Array:
    blocks, scale = _Blocks(order, sizes, weight.shape[1]), weight.reshape(-1)

    def expert(y: Array, one: Any) -> tuple[Array, None]:
        layer, start, stop = one

        def block(i: Array, y: Array) -> Array:
            pair, token, used = blocks.pairs(start, stop, i)
            out = _rows(jnp.matmul, x[token], scale[pair], layer)
            return y.at[token].add(jnp.where(used[:, None], out, 0).astype(y.dtype))

        return jax.lax.fori_loop(0, blocks.count(start, stop), block, y), None

    y = jnp.zeros(x.shape, accumulator(x))
    return jax.lax.scan(expert, y, (layer, blocks.start, blocks.stop))[0].astype(x.dtype)


def _blocks_backward(
    x: Array, weight: Array, layer: Experts, order: Array, sizes: Array, dy: Array
) -> tuple[Array, Array, Experts]:
    blocks, scale = _Blocks(order, sizes, weight.shape[1]), weight.reshape(-1)

    def expert(sums: Any, one: Any) -> tuple[Any, Experts]:
        layer, start, stop = one

        def block(i: Array, sums: Any) -> Any:
            dx, dscale, dlayer = sums
            pair, token, used = blocks.pairs(start, stop, i)
            _, vjp = jax.vjp(partial(_rows, jnp.matmul), x[token], scale[pair], layer)
            drows, ds, dl = vjp(jnp.where(used[:, None], dy[token], 0))
            dx = dx.at[token].add(drows.astype(dx.dtype))
            return dx, dscale.at[pair].add(ds), jax.tree.map(_add, dlayer, dl)

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accumulator(w)), layer)
        *sums, dlayer = jax.lax.fori_loop(0, blocks.count(start, stop), block, (*sums, zeros))
        return sums, jax.tree.map(_as, dlayer, layer)

    sums = [jnp.zeros(x.shape, accumulator(x)), jnp.zeros_like(scale)]
    (dx, dscale), dlayer = jax.lax.scan(expert, sums, (layer, blocks.start, blocks.stop))
    return dx.astype(x.dtype), dscale.reshape(weight.shape), dlayer


def _ragged(
    x: Array, weight: Array, layer: Experts, order: Array, sizes: Array, *, chunk: int
) -> Array:
    chunks, scale = _Chunks(order, sizes, weight.shape[1], chunk), weight.reshape(-1)

    def compute(y: Array, at: Array) -> Array:
        pair, token, used, dot = chunks.pairs(at)
        rows = jnp.where(used[:, None], x[token], 0)
        out = jnp.where(used[:, None], _rows(dot, rows, scale[pair], layer), 0)
        return y.at[token].add(out.astype(y.dtype))

    return chunks.over(compute, jnp.zeros(x.shape, accumulator(x))).astype(x.dtype)


def _ragged_backward(
    x: Array, weight: Array, layer: Experts, order: Array, sizes: Array, dy: Array, *, chunk: int
) -> tuple[Array, Array, Experts]:
    chunks, scale = _Chunks(order, sizes, weight.shape[1], chunk), weight.reshape(-1)

    def compute(sums: Any, at: Array) -> Any:
        dx, dscale, dlayer = sums
        pair, token, used, dot = chunks.pairs(at)
        rows = jnp.where(used[:, None], x[token], 0)
        _, vjp = jax.vjp(partial(_rows, dot), rows, scale[pair], layer)
        drows, ds, dl = vjp(jnp.where(used[:, None], dy[token], 0))
        dx = dx.at[token].add(jnp.where(used[:, None], drows, 0).astype(dx.dtype))
        dscale = dscale.at[pair].add(jnp.where(used, ds, 0))
        return dx, dscale, jax.tree.map(_add, dlayer, dl)

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accumulator(w)), (x, layer))
    sums = zeros[0], jnp.zeros_like(scale), zeros[1]
    dx, dscale, dlayer = chunks.over(compute, sums)
    return dx.astype(x.dtype), dscale.reshape(weight.shape), jax.tree.map(_as, dlayer, layer)


class _Chunks:
    """All pairs, of one expert after another, in chunks of as many rows.

    Experts that are none of these come last: chunks of nothing else are skipped.
    """

    def __init__(self, order: Array, sizes: Array, per_token: int, chunk: int):
        count = -(-len(order) // chunk)
        self.rows = -(-len(order) // (count * ROWS)) * ROWS
        self.order = jnp.pad(order, (0, count * self.rows - len(order)))
        self.per_token = per_token
        self.stop = jnp.cumsum(sizes)
        self.start = self.stop - sizes

    def pairs(self, at: Array) -> tuple[Array, Array, Array, Callable[[Array, Array], Array]]:
        """Pairs from place `at`, their tokens, which are of these experts, and the product of
        each of their rows with its expert's matrix."""
        pair = jax.lax.dynamic_slice(self.order, (at,), (self.rows,))
        stop, start = (jnp.clip(x - at, 0, self.rows) for x in (self.stop, self.start))
        dot = partial(grouped_dot, sizes=(stop - start).astype(jnp.int32))
        return pair, pair // self.per_token, jnp.arange(self.rows) < stop[-1], dot

    def over(self, compute: Callable[[Any, Array], Any], sums: Any) -> Any:
        """`sums` after every chunk that has a row to compute."""

        def step(sums: Any, at: Array) -> tuple[Any, None]:
            return jax.lax.cond(at < self.stop[-1], compute, lambda s, _: s, sums, at), None

        return jax.lax.scan(step, sums, jnp.arange(0, len(self.order), self.rows))[0]


def _add(total: Array, x: Array) -> Array:
    return total + x.astype(total.dtype)


def _as(x: Array, like: Array) -> Array:
    return x.astype(like.dtype)
