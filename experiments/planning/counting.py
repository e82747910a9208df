"""What a traced program computes and sends, counted from its jaxpr for one device.

A jaxpr flows in; FLOPs of matrix products and the bytes of every collective flow out. A loop's
body counts as often as it runs, what is computed again under remat counts again, a ragged
product counts its rows once, and a kernel says itself what it costs: none of which the
compiler's own figures do. Shapes are those of a device: inside a `shard_map` as they are,
outside of one by the sharding that each array's type has.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from forge_jax.collectives import LENDING

K = TypeVar("K")
ATTENTION = "tree_attention"  # in the names of the kernels that walk lists of tile pairs

REDUCTIONS = ("psum", "pmax", "pmin")
COLLECTIVES = (*REDUCTIONS, "all_gather", "reduce_scatter", "all_to_all", "ppermute")
# Products of bfloat16 that one of float32 factors is made of on a TPU, by its precision.
PASSES = {jax.lax.Precision.HIGHEST: 6, jax.lax.Precision.HIGH: 3}


class Sent(NamedTuple):
    """A kind of collective."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, over which it goes
    weights: bool  # of weights or their gradients, or beside products: nobody waits


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device does."""

    flops: float = 0.0  # of matrix products, kernels' included; a multiply-add is two
    passes: float = 0.0  # the same, times the bfloat16 products that each is made of
    sent: Mapping[Sent, float] = field(default_factory=dict)  # bytes that it sends on a ring

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            passes=self.passes + other.passes,
            sent=added(self.sent, other.sent),
        )

    def times(self, n: float) -> "Work":
        """The work of `n` runs."""
        return Work(
            flops=n * self.flops,
            passes=n * self.passes,
            sent={key: n * size for key, size in self.sent.items()},
        )

    @property
    def sent_bytes(self) -> float:
        """Of all collectives."""
        return sum(self.sent.values())


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a program's shapes do not tell."""

    mesh: Mapping[str, int]  # devices along each axis
    live: float = 1.0  # share of the tile pairs listed for attention that are visited
    taken: float = 1.0  # how often a conditional takes its costlier branch


def added(*parts: Mapping[K, float]) -> dict[K, float]:
    """The sum of every key's values."""
    total: dict[K, float] = defaultdict(float)
    for part in parts:
        for key, size in part.items():
            total[key] += size
    return dict(total)


def count(program: core.ClosedJaxpr | core.Jaxpr, known: Known) -> Work:
    """The work of a program. Raises NotImplementedError for work that no bound is known of."""
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    return _jaxpr(jaxpr, [True] * len(jaxpr.outvars), known, scope="", manual=False)


def _jaxpr(jaxpr: core.Jaxpr, used: list[bool], known: Known, scope: str, manual: bool) -> Work:
    """What nobody uses is not computed: the compiler leaves it out."""
    outs = zip(jaxpr.outvars, used, strict=True)
    live = {var for var, read in outs if read and not isinstance(var, core.Literal)}
    total = Work()
    for eqn in reversed(jaxpr.eqns):
        wanted = [var in live for var in eqn.outvars]
        if any(wanted) or eqn.effects:
            total = total + _equation(eqn, wanted, known, scope, manual)
            live |= {var for var in eqn.invars if not isinstance(var, core.Literal)}
    return total


def _equation(eqn: Any, wanted: list[bool], known: Known, scope: str, manual: bool) -> Work:
    name, scope = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
    if name == "dot_general":
        return _products(eqn, _dense(eqn) / (1 if manual else _parts(eqn, known.mesh)))
    if name == "ragged_dot_general":
        return _products(eqn, _ragged(eqn))
    if name == "pallas_call":
        return _kernel(eqn, known.live)
    if name in COLLECTIVES:
        return _collective(eqn, known, scope)
    manual = manual or name == "shard_map"
    inner = [
        _jaxpr(body, _used(body, wanted, eqn), known, scope, manual)
        for body in map(_open, _bodies(eqn))
    ]
    if name == "cond":
        return _conditional(eqn, inner, known)
    whole = sum(inner, Work())
    if name == "while" and (whole.flops or whole.sent):
        raise NotImplementedError("a loop of unknown length around products or collectives")
    return whole.times(eqn.params["length"] if name == "scan" else 1)


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs that an equation may run, on a TPU."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return list(core.jaxprs_in_params(eqn.params))
    meant = [
        branch
        for names, branch in zip(platforms, eqn.params["branches"], strict=True)
        if names is None or "tpu" in names
    ]
    return meant[:1]


def _used(body: core.Jaxpr, wanted: list[bool], eqn: Any) -> list[bool]:
    """Which results of a body somebody reads: all that a loop hands on, for one."""
    if eqn.primitive.name == "scan":
        carried = eqn.params["num_carry"]
        return [True] * carried + wanted[carried:]
    same = eqn.primitive.name != "while" and len(body.outvars) == len(wanted)
    return wanted if same else [True] * len(body.outvars)


def _conditional(eqn: Any, inner: list[Work], known: Known) -> Work:
    least, *_, most = sorted([*inner, inner[0]], key=lambda work: (work.passes, work.sent_bytes))
    return most.times(known.taken) + least.times(1 - known.taken)


def _open(x: Any) -> core.Jaxpr:
    return x.jaxpr if isinstance(x, core.ClosedJaxpr) else x


def _products(eqn: Any, flops: float) -> Work:
    wide = all(var.aval.dtype.itemsize >= 4 for var in eqn.invars[:2])
    said = eqn.params["precision"]
    said = said if isinstance(said, tuple) else (said,)
    return Work(flops=flops, passes=flops * max(PASSES.get(p, 1) if wide else 1 for p in said))


def _dense(eqn: Any) -> float:
    """Of all devices outside of a `shard_map`, of one inside."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)


def _parts(eqn: Any, mesh: Mapping[str, int]) -> int:
    """Devices that share a product, by the types of its arrays."""
    axes = {
        axis
        for var in (*eqn.invars, *eqn.outvars)
        for entry in var.aval.sharding.spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(axis, str)
    }
    return math.prod(mesh[axis] for axis in axes)


def _ragged(eqn: Any) -> float:
    """Every row with the matrix of one group, or into it."""
    rows, columns = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape[-1]
    if len(eqn.invars[1].aval.shape) == 3:  # [m, k] x [g, k, n] -> [m, n]
        return 2.0 * rows[0] * rows[1] * columns
    return 2.0 * rows[0] * math.prod(eqn.outvars[0].aval.shape[-2:])  # [m, k] x [m, n] -> [g, k, n]


def _kernel(eqn: Any, live: float) -> Work:
    name, cost = eqn.params["name"] or "", eqn.params["cost_estimate"]
    if cost is None:
        raise NotImplementedError(f"kernel {name!r} does not estimate its cost")
    wide = all(var.aval.dtype != jnp.bfloat16 for var in eqn.invars)
    flops = cost.flops * (live if ATTENTION in name else 1)
    return Work(flops=flops, passes=flops * (PASSES[jax.lax.Precision.HIGHEST] if wide else 1))


def _collective(eqn: Any, known: Known, scope: str) -> Work:
    """What a device sends where ranks pass their parts around a ring, in both directions."""
    name = eqn.primitive.name
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(sorted(axes if isinstance(axes, tuple) else (axes,)))
    axes = tuple(axis for axis in axes if isinstance(axis, str) and known.mesh[axis] > 1)
    ranks = math.prod(known.mesh[axis] for axis in axes)
    read, written = (
        sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in found)
        for found in (eqn.invars, eqn.outvars)
    )
    if ranks == 1:
        return Work()
    others = (ranks - 1) / ranks
    size = {
        "all_gather": written * others,
        "reduce_scatter": read * others,
        "all_to_all": read * others,
        "ppermute": read,
    }.get(name, 2 * read * others)
    return Work(sent={Sent(name, axes, LENDING in scope): size})
