"""Device records: frozen dataclasses that are pytrees, and the parameter descriptor."""

import dataclasses
from typing import NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: T) -> T:
    """Makes a class a frozen keyword-only dataclass whose fields are pytree children.

    A field declared with ``metadata={"static": True}`` is part of the treedef.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)  # type: ignore[assignment]
    return jax.tree_util.register_dataclass(cls)


class Param(NamedTuple):
    """Describes one parameter once; init, sharding and checkpoint names derive from it."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, see sharding.RULES
    std: float  # of its normal initialiser; 0 means that all values are `fill`
    fill: float = 1.0  # of norm scales


def is_param(x: object) -> bool:
    """Leaf test for `jax.tree.map` over a layout."""
    return isinstance(x, Param)


@pytree
class Mean:
    """A metric that may be added across micro-batches and divided once, on the host."""

    total: jax.Array  # f32[]
    count: jax.Array  # f32[]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @staticmethod
    def of(values: jax.Array, where: jax.Array) -> "Mean":
        """The weighted mean of `values`, weights `where` (0 leaves a value out)."""
        return Mean(
            total=jnp.sum(jnp.where(where > 0, values * where, 0.0)),
            count=jnp.sum(where),
        )
