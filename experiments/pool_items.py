"""Items of a pool, one after another, with a bar on the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.progress import Progress

from forge_jax.sched.codec import CorruptObject, decode
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode

T = TypeVar("T")


def intact(
    pool: Pool, items: Sequence[int], bars: Progress, title: str, done: int = 0
) -> Iterator[tuple[int, tuple[Episode, ...]] | None]:
    """Bytes and episodes of each item, None for one that is not whole, which is left where it
    is. `done` were read before."""
    for item in shown(items, bars, title, done):
        try:
            data = pool.get_object(item)
            yield len(data), decode(data, f"items/{item:012d}")
        except (CorruptObject, KeyError):  # deleted meanwhile
            yield None


def shown(things: Sequence[T], bars: Progress, title: str, done: int = 0) -> Iterable[T]:
    """`things`, and on the terminal how many were, after `done` others."""
    bar = bars.add_task(title, total=done + len(things), completed=done, shown="")
    for thing in things:
        yield thing
        bars.advance(bar)
