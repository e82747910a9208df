"""How the pages of a pool are read and written, and what a mesh's places do of it by themselves.

Functions over rows, heads and pages go in; the same functions, each place's over its own parts,
come out. Places are cut over every axis of the mesh along which tokens are dealt out, and inside
of them kv heads over "tensor". Invariant: a place reads and writes its own pages alone, and with
one place a function is what it was.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from forge_jax.attention.paged import paged_attention
from forge_jax.collectives import Cut
from forge_jax.models.transformer import Ready
from forge_jax.rollout.packets import DecodeShape, PrefillShape
from forge_jax.sharding import RULES, rows_over

Pool = tuple[tuple[Array, Array], ...]
# How arrays are dealt out: by their first dimension; [B, T, H, D] by heads too; so are pages and
# what is gathered of them, [P or B, K, ...].
ROWS, HEADS, PAGES = "rows", "heads", "pages"


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a call knows of the pool that it reads."""

    page: int  # tokens of a page
    pages: int  # of a place
    places: int
    attention: str  # see `paged_attention`
    mesh: Mesh | None  # of Auto axes, that the arrays are on

    @property
    def direct(self) -> bool:
        """Pages are read where they are."""
        return self.attention == "pallas"

    @property
    def ready(self) -> Ready:
        """How the model's weights are computed with beside the pool."""
        rows = () if self.places == 1 else rows_over(self.mesh)
        return Ready(cut=Cut(spread=self.mesh, rows=rows))

    def local(self, table: Array) -> Array:
        """A table with the numbers that its pages have at their place."""
        return table if self.places == 1 else table % self.pages

    def pinned(self, states: Any) -> Any:
        """States of slots and pages, dealt out as they came: else each call is compiled anew."""
        if self.places == 1:
            return states
        assert self.mesh is not None, f"{self.places} places without a mesh"
        where = NamedSharding(self.mesh, jax.P(rows_over(self.mesh)))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, where), states)

    def each(
        self, work: Callable[..., Any], ins: tuple[str, ...], outs: Any, kv_heads: int = 1
    ) -> Callable[..., Any]:
        """`work`, done by every place over its part of arguments that are dealt out as `ins`
        say, to results dealt out as `outs` say. Heads are whole where `kv_heads` do not divide."""
        if self.places == 1:
            return work
        assert self.mesh is not None, f"{self.places} places without a mesh"
        rows, heads = rows_over(self.mesh), cut_heads(kv_heads, self.mesh)
        specs = {ROWS: jax.P(rows), HEADS: jax.P(rows, None, heads), PAGES: jax.P(rows, heads)}
        return jax.shard_map(
            work,
            mesh=self.mesh,
            in_specs=tuple(specs[name] for name in ins),
            out_specs=jax.tree.map(specs.__getitem__, outs),
            check_vma=False,
        )

    def over_pages(self, keys: Array, scale: float) -> Callable[..., Any]:
        """`paged_attention` inside of a place. With one place every device of a mesh runs the
        kernel on its own kv heads, if they are cut, and on all rows."""
        read = partial(paged_attention, scale=scale, implementation=self.attention)
        if self.mesh is None or self.places > 1 or not self.direct:
            return read
        cut = cut_heads(keys.shape[1], self.mesh)
        heads, pages = jax.P(None, None, cut), jax.P(None, cut)
        return jax.shard_map(
            read,
            mesh=self.mesh,
            in_specs=(heads, pages, pages, jax.P(), jax.P()),
            out_specs=(heads, heads),
            check_vma=False,
        )


def places_of(mesh: Mesh | None) -> int:
    """How many places a mesh has."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in rows_over(mesh))


def access_to(
    pool: Pool, shape: PrefillShape | DecodeShape, attention: str, mesh: Mesh | None
) -> Access:
    """What a call of `shape` knows of `pool`."""
    count, _, page, _ = pool[0][0].shape
    assert shape.places in (1, places_of(mesh)), f"{shape.places} of {places_of(mesh)} places"
    return Access(
        page=page,
        pages=count // shape.places,
        places=shape.places,
        attention=attention,
        mesh=mesh,
    )


def cut_heads(kv_heads: int, mesh: Mesh) -> str | None:
    """The axis over which kv heads are cut, as their weights are; None where they do not divide."""
    [axis] = RULES["kv_heads"]
    return axis if kv_heads % mesh.shape[axis] == 0 else None
